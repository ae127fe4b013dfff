"""The compile path for a CUDA device on a machine without one."""
