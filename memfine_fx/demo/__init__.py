"""Demo: a small training run, three ways, and small instances of real architectures to try things on.

In: the command line's options, or the name of an architecture. Out: a table and a chart of memory, time and loss; a
model with random weights (`tiny`), its config shrunk by the names of its fields (`tiny_config`).
Each mode trains in a process of its own, so that one's peak is not another's. It goes through the public functions,
as a user would.
"""
