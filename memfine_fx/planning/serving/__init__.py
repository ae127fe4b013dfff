"""Plans disaggregated serving (in the making)."""
