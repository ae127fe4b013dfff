"""Source: expert loops that never reach a graph as they are written, rewritten for the time of a compiled call.

In:     a model, whose methods' source is read once.
Out:    methods that stand on its modules while a compiled call runs, where a loop in them could be rewritten.
Never:  the model, its classes and its files are not changed. What a method does outside of the loops below stays as it
        is written; methods without source or with another than they run, with decorators or closures are not touched at
        all, nor is torch's own code.

The idea: a loop that skips experts without rows computes the same as one that runs every expert, if the body does
nothing for an expert without rows. The first runs as often as the data says, which no graph can hold; the second E
times. So a loop is made to run every expert, and each body that it skips is marked with its condition. Nothing is
proved from the source: `passes.read.guards` proves in the graph that a marked body does nothing where its condition
skips it.

Failure: a loop that matches no form, or is used in another way than the form allows, stays as its author wrote it. So
does a method with a body that is not proved (`GuardRefused`), and the report names the line. A rewritten loop that is
not raised ends the attempt (`LeftoverShapes`), what it ran is undone, and the model is compiled with other flags and in
the end with none, where no method is installed.

methods   from modules to rewritten functions and back
loops     the forms, and their order
guards    conditions that skip a body, as marks
liveness  which names are read after a statement
indices   a loop's variable that was a tensor and becomes a number
offsets   slices by running offsets, cut by one split
effects   branches that add zero, which are dropped
syntax    patterns
helpers   what rewritten code calls

The forms and the rows of docs/coverage.md that each earns are listed there, from `benchmarks.coverage.forms`.
"""

from memfine_fx.capture.source.methods import RewrittenLoops

__all__ = ["RewrittenLoops"]
