"""Source: expert loops that never reach a graph as they are written, rewritten for the time of a compiled call.

In:     a model, whose methods' source is read once.
Out:    methods that stand on its modules while a compiled call runs, where a loop in them could be rewritten.
Never:  the model, its classes and its files are not changed. What a method does outside of the loops below stays as it
        is written; methods without source or with another than they run, with decorators or closures are not touched at
        all, nor is torch's own code.

The idea: a loop that skips experts without rows computes the same as one that runs every expert, provided that whatever
an expert does, it does to its own rows. The first runs as often as the data says, which no graph can hold; the second
E times. So a loop is made to run every expert, and what it was skipped for is marked (`rows_of` and its like). That
the marks hold, and that an expert works on its own rows alone, is proved where the loop is read; that it does nothing
else is `effects`.

Failure: a loop that matches no form, or is used in another way than the form allows, stays as its author wrote it. A
rewritten loop that is not raised ends the attempt (`LeftoverShapes`), what it ran is undone, and the model is compiled
with other flags and in the end with none, where no method is installed.

methods   from modules to rewritten functions and back
loops     the forms, and their order
indices   a loop's variable that was a tensor and becomes a number
offsets   slices by running offsets, cut by one split
effects   what an expert without rows would do, which keeps a loop as it is
syntax    patterns
helpers   what rewritten code calls

The forms and the rows of docs/coverage.md that each earns are listed there, from `benchmarks.coverage.forms`.
"""

from memfine_fx.capture.source.methods import RewrittenLoops

__all__ = ["RewrittenLoops"]
