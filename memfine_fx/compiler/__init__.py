"""The pipeline, and the sessions that keep what it compiled."""
