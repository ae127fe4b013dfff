"""Expert parallelism: experts sharded over a process group, rows exchanged in rounds of bounded size.

placement   which rank owns which experts
schedule    count matrix -> rounds, a pure function
slices      the paper's token slices in the place of rounds, for comparison
exchange    counts, rows and results over torch.distributed, with errors that name layer and round
packing     tensors that travel together as columns of one buffer
arrival     rows of one round on their way
saved       rounds that forward saves for backward
walk        forward and backward of one layer, round by round, on the bodies of the single process
bandwidth   bytes a second between the ranks, measured once
groups      the process group and its replicas
shard       parameters of a model cut in place, and the op that stands for the whole table in a trace
adapters    PEFT's factors beside tables, cut with them
state       sharded state dicts through torch.distributed.checkpoint
"""
