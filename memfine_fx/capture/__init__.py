"""Capture: what Dynamo needs to give whole graphs, by means that are tried and taken back.

In: a model and its call. Out: the same call, traced without breaks where that is possible, and the model as it was.
One idea: flags and rewritten loops are attempts. Whatever they let into a graph must end in a region; if it does
not, the attempt is given up and the model runs as it would without it. What was changed on a model is put back.
It knows neither plans nor the compiler; of the passes only the markers that it writes into loops, to be found there.

implementation   transformers' own switch between an eager expert loop and capturable spellings
flags            Dynamo's flags for data-dependent shapes, kept only where regions swallow all they let in
loops            expert loops rewritten in their source (`rewriting`, `offsets`, `syntax`, `zero_terms`, `helpers`)
output_recorders, adapters, buckets, ranks   models that record outputs, LoRA, DDP's buckets, ranks that must agree
undo             what a traced or measured call changed, put back
"""
