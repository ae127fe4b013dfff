"""A small training run, three ways: what memfine does to memory, time and the loss."""
