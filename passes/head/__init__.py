"""Heads of language models in a captured graph."""
