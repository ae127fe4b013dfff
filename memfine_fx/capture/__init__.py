"""Capture: what Dynamo needs to give whole graphs, by means that are tried and taken back.

In: a model and its call. Out: the same call, traced without breaks where that is possible, and the model as it was.
One idea: flags and rewritten loops are attempts. Whatever they let into a graph must end in a region; if it does
not, the attempt is given up and the model runs as it would without it. What was changed on a model is put back.
It knows neither plans nor the compiler; of the passes only the markers that it writes into loops, to be found there.

implementation   transformers' own switch between an eager expert loop and capturable spellings
source           methods with expert loops that reach no graph, rewritten for the time of a compiled call
flags            Dynamo's flags for data-dependent shapes, used only where all they let into graphs ends in regions
output_recorders transformers' recorders, installed before a call instead of in it
adapters         PEFT's adapters on expert tables, in the graph
buckets, ranks   settings under DistributedDataParallel, and with experts on several ranks
installing       methods that stand on modules for the time of calls
undo             what a traced or measured call changed, put back
"""
