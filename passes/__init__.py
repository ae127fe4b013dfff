"""The compiler's passes: from a traced graph to chunked expert loops.

Each module holds one step: find candidate regions, normalise them, raise them to an `MoERegion` with the
one file of `families/` that knows the spelling, prove that the expert function is row-wise, lower the
region to a chunked call, and verify the result. Passes take a valid FX graph and leave a valid one; what
they cannot handle they refuse, with the reason and the node. They import leaf modules of memfine_fx only.
"""

if __name__ != "memfine_fx.passes":
    raise ImportError("import memfine_fx.passes, not passes")
