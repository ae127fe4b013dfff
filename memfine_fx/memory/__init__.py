"""Memory: counts bytes, before anything runs and while it runs.

In: graphs with sizes as symbols, sizes of a region, living optimizers, the allocator's events. Out: numbers, and
expressions in the graph's symbols, each term with a name.
One idea: a byte count is an expression made once when a graph is compiled; asking for another length or chunk size
only puts in other numbers. What the compiled code allocates is read from that code (`wrapper_code`), what no graph
shows (scratch of kernels) comes from formulas that are held against this machine once (`machine`, `kernel_probe`).
It decides nothing: what to do with the bytes is plan's. It knows records, and no pass, runtime or session.
"""
