"""Runtime: what is awake while a step runs.

In: tensors of one call, and the region's record in the store: its compiled functions and how its plan is chosen. Out:
the experts' combined output, and in backward every gradient.
One idea: rows are put in their experts' order once, saved as index arrays, and walked chunk by chunk; each chunk is
computed, added where it belongs and dropped, and backward recomputes it. So of the routed rows only one chunk's
are alive at a time, and a chunk that finds no memory is walked again in halves (`halving`) without changing a
result.
It is handed decisions through records and callables. It knows no pass, no plan and no compiler: compiled code finds
it by the name of an op and a region id in the store.
"""
