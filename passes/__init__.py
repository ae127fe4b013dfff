"""The compiler's passes: from a traced graph to chunked expert loops.

`read` finds the regions of a graph and writes their expert functions, `head` finds language models' heads, `lower`
puts a chunked call in a region's place, `verify` compares the two, `step` says what forward saves for backward.
Passes take a valid FX graph and leave a valid one; what they cannot handle they refuse, with the reason and the node.
What they may import is a table in tests/test_layers.py.
"""

if __name__ != "memfine_fx.passes":
    raise ImportError("import memfine_fx.passes, not passes")
