"""Families: one file a spelling of "rows times their expert's weights".

A family is the few rules that one spelling adds to the common ones. Adding a spelling is adding a file and
its line in `memfine_fx.passes.raising.FAMILIES`.
"""
