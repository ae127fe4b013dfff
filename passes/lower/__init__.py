"""Lower: from a raised region to an op in the graph and the compiled functions that the op runs.

In: a region's record: the expert function, its parameters, the nodes that it replaces. Out: a graph with one call in
their place; compiled functions over R rows, forward and backward, compiled once for every number of rows; their byte
terms. One idea: the op has a region id instead of code. The graph says where, the store says what runs there, so a plan
can change between two calls without compiling anything again. It never judges whether a region may be rewritten
(reading has proved that) nor how large chunks are (plans say). It knows memory and the runtime's records, no session.
"""
