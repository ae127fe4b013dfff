"""Everything private that is used of torch, transformers, accelerate and PEFT: one module a package, or a part of it.

Terms
    private   a name with a leading underscore in its dotted path, or what a package promises nobody: what its generated
              code looks like, what it writes into a graph's `meta`, whose frames it leaves on the stack
    feature   a private name, or a few that make sense only together, as a `checks.Feature`: what it is for, in which
              versions it was seen to hold, what is lost without it, and a self-check

A feature is asked (`holds`) where what needs it first runs, never at import. One that does not hold switches off what
needs it, with one `CompatibilityWarning`. Where gradients would be wrong without it, nothing is chunked: the model is
compiled as if memfine_fx were not there.

Nothing outside this room names anything private; tests/test_private_names.py asks. `python -m memfine_fx.compat` lists
the features and whether they hold here.
"""
