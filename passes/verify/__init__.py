"""A rewrite against what it replaces."""
