"""What a model's layers do and how long that takes on a system: sizes, strategies, work, seconds, collectives."""
