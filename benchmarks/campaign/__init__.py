"""Campaigns: a promise asked a thousand times, at random points."""
