"""Expert parallelism: experts sharded over a process group, rows exchanged in rounds of bounded size.

placement   which rank owns which experts
schedule    count matrix -> rounds, a pure function
exchange    counts, rows and results over torch.distributed, with errors that name layer and round
all_to_all  the rows of one round in flight, packed as columns of buffers
round_loop  forward and backward of one layer, round by round, on the compiled experts of the single process, and the
            rounds that forward saves for backward
sharded     what the op pair calls for a region with sharded experts; also the paper's token slices, for comparison
bandwidth   bytes a second between the ranks, measured once
groups      the process group and its replicas
shard       parameters of a model cut in place, and the op that stands for the whole table in a trace
adapters    PEFT's factors beside tables, cut with them
state       sharded state dicts through torch.distributed.checkpoint
"""
