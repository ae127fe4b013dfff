"""Bytes and seconds of memfine_fx beside what its users would pick instead."""
