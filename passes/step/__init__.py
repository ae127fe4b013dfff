"""Step: what the forward of a whole graph keeps for its backward, and the order in which kernels run.

In: the joint graph of a model with chunked regions, and a budget that answers "what would the peak be". Out: forward
and backward; regions whose forward keeps something; kernels that stand where the graph has them.
One idea: everything that forward may keep takes bytes and spares seconds. Without a budget only elementwise work and
a few matmuls are computed again (`spare`); under one, what fits in the least time is chosen (`fit`). functorch's
partitioner still cuts the graph; tags say what it must not decide otherwise.
It decides per graph, never per call, and knows no session: a budget is handed in.
"""
