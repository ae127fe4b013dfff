"""Expert parallelism: experts sharded over a process group, rows exchanged in rounds of bounded size.

placement   which rank owns which experts
schedule    count matrix -> rounds, a pure function
exchange    counts, rows and results over torch.distributed, with errors that name layer and round
walk        forward and backward of one layer, round by round, on the bodies of the single process
groups      the process group and its replicas
shard       parameters of a model cut in place, and the op that stands for the whole table in a trace
state       sharded state dicts through torch.distributed.checkpoint
"""
