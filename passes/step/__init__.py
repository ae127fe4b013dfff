"""Step: what the forward of a whole graph saves for its backward, and the order in which kernels run.

In: the joint graph of a model with chunked regions, and a budget that answers "what would the peak be". Out: forward
and backward; regions whose forward saves rows; kernels in the graph's order.
One idea: everything that forward may save takes bytes and spares seconds. Without a budget only elementwise work and
a few matmuls are recomputed (`costly_results`); under one, the fastest choice that fits is made (`fit`). functorch's
partitioner still cuts the graph; tags fix what it must not decide otherwise.
It decides per graph, never per call, and knows no session: a budget is handed in.
"""
