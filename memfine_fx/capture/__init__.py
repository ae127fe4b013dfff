"""Capture: getting expert loops of an unmodified model into a graph, by means that are tried and taken back.

implementation   transformers' own switch between an eager expert loop and capturable spellings
source           methods with expert loops that reach no graph, rewritten for the time of a compiled call
flags            Dynamo's flags for data-dependent shapes, kept only where regions swallow all they let in
undo             what an attempt that is taken back has changed
recorded         transformers' recorders, installed before a call instead of in it
adapters         PEFT's adapters on expert tables, in the graph
buckets, ranks   settings under DistributedDataParallel, and with experts on several ranks
installing       methods that stand on modules for the time of calls
"""
