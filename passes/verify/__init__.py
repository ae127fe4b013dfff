"""Verify: a rewrite against what it replaces, as numbers.

In: a raised region or head, and its live counterpart. Out: worst relative errors of outputs and of every gradient,
or why they could not be compared; what does not agree is refused.
One idea: both forms are cut out of the graph and run by themselves; the original in fp64 is the truth, and its own
error in the precision of the model says how much may be rounding. Where the user asks, a falsified form must fail
too, or the check proves nothing. `gradient_check` does this for every new kind of layer on a few tokens; `region`
and `head` on a real call's inputs, where the user asks. It uses the very functions that lower, and decides nothing
of plans.
"""
