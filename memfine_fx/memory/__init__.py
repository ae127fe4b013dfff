"""Bytes: predicted from graphs and from the paper's closed form, and measured exactly."""
