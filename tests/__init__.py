"""Tests. Every process of them begins here, those too that tests start."""

import gc

import torch._dynamo.config

# On Python 3.13.0 alone Dynamo warns of slower guards, which is an error where a test counts warnings.
torch._dynamo.config.issue_3_13_0_warning = False

# Compilers make millions of objects and few cycles: collecting as rarely as this takes a tenth of the tests' time away.
gc.set_threshold(100_000, 20, 50)
