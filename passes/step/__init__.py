"""What the forward of a step keeps for its backward, and the order of its kernels."""
