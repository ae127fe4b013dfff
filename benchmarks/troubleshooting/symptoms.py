"""What a reader of docs/troubleshooting.md sees happen, what it means and what to do; and which messages say it."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.troubleshooting.messages import Message

__all__ = ["SECTIONS", "Section", "Symptom", "symptom_of"]


@dataclass(frozen=True)
class Symptom:
    """One entry of the page.

    Args:
        title: what is seen.
        advice: what it means and what to do, in Markdown.
        words: a message that holds one of these belongs here.
        sources: so does one that is made in one of these files.
        kinds: only messages of these kinds; empty for any.
    """

    title: str
    advice: str
    words: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()

    def holds(self, message: Message) -> bool:
        if self.kinds and message.kind not in self.kinds:
            return False
        return message.source.startswith(self.sources or ("\0",)) or any(word in message.text for word in self.words)


@dataclass(frozen=True)
class Section:
    """A heading, its introduction and its entries; messages go to the first entry of the page that holds them."""

    title: str
    text: str
    symptoms: tuple[Symptom, ...]


def symptom_of(message: Message) -> Symptom | None:
    """The entry of a message, None where the page has none."""
    entries = (one for section in SECTIONS for one in section.symptoms)
    return next((one for one in entries if one.holds(message)), None)


_SILENT = (
    Symptom(
        "The peak did not fall",
        "`print(memfine_fx.report(model))` after a step. If it counts no chunked region, the refusals below "
        "it say why. If it does, the terms of the predicted peak are listed largest first: what is above the "
        "experts (parameters, optimizer state, logits, activations of attention) is not theirs to save. Give "
        "a `memory_budget` to have the dense part computed again too ([Choosing a budget](budget.md)), or the"
        " model's own gradient checkpointing.",
    ),
    Symptom(
        "The first step takes long",
        "Inductor compiles the graph around the experts and one forward and backward for each distinct expert"
        " function. Equal layers share theirs, and a second process takes both from Inductor's cache on disk."
        ' `inner_backend="aot_eager"` or `"eager"` skips Inductor, for debugging.',
    ),
    Symptom(
        "Losses differ in the last digits",
        "Sums over a token's K experts and over an expert's rows run in another order than in eager code. "
        "`memfine_fx.verify(model, **batch)` measures every region against fp64, with adversarial routings, "
        "and prints the worst error of the rewritten and of the original form.",
    ),
    Symptom(
        "An expert without tokens has a gradient of zeros where eager training has None",
        "The chunked loop writes the gradient of the whole table. An optimizer with weight decay then decays "
        "such an expert too, as it does with stacked experts in eager code.",
    ),
    Symptom(
        "A pickled model does not load where memfine_fx is not installed",
        "`torch.save(model)` writes a model that is optimized again when it is read, as `copy.deepcopy` gives one. "
        "Save `model.state_dict()` for elsewhere: it is the plain model's.",
    ),
)

_WARNINGS = (
    Symptom(
        "Nothing to chunk",
        "The model was compiled without any chunked region. The reasons in the message are the refusals "
        "below. If there is none, no routing decision (a top-k or arg-max with experts behind it) is in any "
        "graph: `TORCH_LOGS=graph_breaks` shows where Dynamo left the code.",
        words=("found nothing to chunk", "memfine_fx found"),
        kinds=("warning",),
    ),
    Symptom(
        "A `CompatibilityWarning`: torch, transformers, accelerate or PEFT is another than was tested",
        "The warning says what is lost; where gradients rest upon it nothing is chunked, and nowhere is anything "
        "guessed. `python -m memfine_fx.compat` lists what memfine_fx relies on and whether it holds here.",
        words=(
            "differs from what memfine_fx knows of",
            "memfine_fx was tested with torch",
            "cannot tell DistributedDataParallel of this torch",
        ),
    ),
    Symptom(
        "A shallow copy is plain",
        "`copy.copy` gives a module that holds the parameters, buffers and submodules of its model, and nothing by "
        "which its call could be told from the model's. `copy.deepcopy` and pickles give optimized copies.",
        words=("copy.copy of an optimized model",),
    ),
    Symptom(
        "DDP had the graph cut",
        "Dynamo cuts graphs of a DDP model at its gradient buckets, and a table of expert weights is larger "
        "than a bucket. `memfine_fx.optimize(model)` before `DistributedDataParallel(model)` keeps the graph "
        "whole; with `torch.compile` set `torch._dynamo.config.optimize_ddp = False`.",
        words=("DistributedDataParallel had the graph cut",),
    ),
    Symptom(
        "Recorded outputs keep layers out of the graphs",
        "Only with the backend's name: transformers installs its recording hooks in the first call, which "
        "breaks the graph. `memfine_fx.optimize(model)` installs them before.",
        words=("the model records outputs",),
    ),
    Symptom(
        "An allocation failed and the chunk was run in parts",
        "The step's result is the same. From then on chunks are smaller, which takes less memory and more "
        "time. A `memory_budget` below what the device has to spare avoids the failed attempt.",
        words=("an allocation failed in a chunk",),
    ),
    Symptom(
        "Sharded experts are gathered",
        "A layer was not chunked, or code outside the compiled graph reads the whole table. Results are "
        "right, but the memory of all experts is taken. `memfine_fx.report(model)` names the layer and the "
        "reason.",
        words=("reads the whole table of sharded experts",),
    ),
    Symptom(
        "Kernels of this CPU take more than is counted",
        "Attention and low-precision products take scratch memory inside one call, which is counted by formulas and "
        "held against this machine's kernels once. Here these take more (another CPU, torch or oneDNN than was tried): "
        "budgets count what was measured, enlarged in proportion to the call, so they are kept, perhaps with more to "
        "spare than is needed. Please report the message with the CPU's model "
        "([Reliability](reliability.md)).",
        words=("bytes of scratch at",),
    ),
    Symptom(
        "The model returned no tensor",
        "`explain(..., measure=True)` needs something to differentiate: a `loss`, or any tensor in the output.",
        words=("the model returned no tensor",),
    ),
    Symptom(
        "memfine_fx failed on a region",
        "A fault of ours. The region runs as it was written; please report the logged traceback.",
        words=("internal error", "memfine_fx failed"),
    ),
)

_TRAINING = (
    Symptom(
        "A model with experts on several ranks is not pickled",
        "One rank holds a part of the experts, so its pickle would not be the model. `model.state_dict()` holds "
        "DTensors for torch.distributed.checkpoint ([Expert parallelism](expert_parallel.md)); `copy.deepcopy(model)` "
        "on every rank gives a copy on the same ranks.",
        words=("several ranks cannot be pickled whole",),
    ),
    Symptom(
        "The budget cannot be met",
        "The message names the smallest budget with a plan and what fills it. Raise the budget to that, make "
        "the batch or sequence smaller, or checkpoint the layers ([Choosing a budget](budget.md)).",
        words=("cannot be met",),
    ),
    Symptom(
        "Out of memory in a chunk of a single row",
        "Chunks were halved down to one row. What is alive outside the experts fills the device: make the "
        "batch or sequence smaller, or checkpoint the layers. `except torch.OutOfMemoryError` catches this "
        "error too.",
        words=("out of memory in a chunk",),
    ),
    Symptom(
        "A second derivative was asked for",
        "`create_graph=True` through a chunked part of the model. Compute second derivatives on the model "
        "without memfine_fx.",
        words=("double backward",),
    ),
    Symptom(
        "Too many routed rows in one layer",
        "Rows are counted in 32 bits. Make the batch or sequence smaller.",
        words=("routed rows in one layer",),
    ),
    Symptom(
        "A rank of an expert parallel group died, hangs or left the step",
        "The other ranks end with this error within the group's timeout. Look at the output of the rank that "
        "does not have it first ([Expert parallelism](expert_parallel.md)).",
        words=("expert parallel exchange failed",),
    ),
    Symptom(
        "Ranks run different models, configs or layers",
        "Build the model and the `Config` equally on every rank, seeds included, and let every rank run the "
        "same layers in the same order. From `optimize`, the message names the first parameter or option that "
        "differs. From a step, it says of every rank which layer it runs in rounds, or which parameter it gathers "
        "whole and why: a region that was refused there alone (another mode, a batch of one), or code outside of "
        "what was compiled (raise `torch._dynamo.config.recompile_limit` where Dynamo gave up on that rank). A rank "
        'that "stopped" has an error of its own. All ranks raise at the same place, and the process group can be '
        "used further.",
        words=("ranks of the expert parallel group do not run the same", "ranks of the expert parallel group differ"),
    ),
)

_OPTIONS = (
    Symptom(
        "A memory budget is not understood",
        'Accepted are None, an int of bytes, a float in (0, 1] of the device\'s memory, and text such as "20GiB".',
        words=(
            "is not a budget",
            "must be positive; expected",
            "is not a fraction",
            "is not understood",
            "a layer's plan",
        ),
    ),
    Symptom(
        "CUDA graphs are refused",
        "A chunk loop reads offsets on the host, which a CUDA graph cannot hold.",
        words=("uses CUDA graphs",),
    ),
    Symptom(
        "An option is unknown or malformed",
        "The options are the fields of `memfine_fx.Config` ([API](api.md)). One that is gone was a constant in all but "
        "name: leave it out.",
        words=("unknown option", "is gone", "options['config']", "config must be", "chunks_head"),
        sources=("memfine_fx/config.py",),
    ),
    Symptom(
        "Something other than a module was given",
        "`optimize`, `explain` and `verify` take a `torch.nn.Module`; functions go through "
        '`torch.compile(function, backend="memfine")`.',
        words=("expects a torch.nn.Module",),
    ),
    Symptom(
        "There is no report yet",
        "A report exists after the first call of an optimized model. Copies made by `copy.deepcopy` are plain.",
        words=("nothing of this model has been compiled",),
    ),
    Symptom(
        "A report has no picture or timeline",
        "Timelines come from `explain(model, ..., measure=True)`, pictures of regions from `explain`.",
        words=("there is no picture", "holds no measured step"),
    ),
    Symptom(
        "expert_parallel is not accepted",
        "It takes a `DeviceMesh` of one dimension, one of two (replicas, experts), or a process group, after "
        "`torch.distributed.init_process_group` (before, `group.WORLD` is None; False means no ranks), on a model "
        "whose experts it can find and has not sharded before.",
        words=("expert_parallel", "sharded already", "no experts were found to shard"),
        kinds=("ConfigError",),
    ),
    Symptom(
        "A package is missing",
        "The core needs torch, sympy and networkx only. The message names the extra that brings the package.",
        words=(
            "which is not installed",
            "tensorboard is not installed",
            "transformers is not installed",
            "need matplotlib",
            "needs pip install 'memfine-fx[cluster]'",
        ),
    ),
    Symptom(
        "passes or models were imported under their short names",
        "They are importable as `memfine_fx.passes` and `memfine_fx.models` only.",
        words=("import memfine_fx.",),
        kinds=("ImportError",),
    ),
    Symptom(
        "A reference layer or a closed form got impossible sizes",
        "`memfine_fx.models` and `memfine_fx.memory` check what they are built from.",
        sources=(
            "models/",
            "memfine_fx/memory/closed_form.py",
            "memfine_fx/plan/layer.py",
            "memfine_fx/memory/measure.py",
        ),
    ),
)

_NOTES = (
    Symptom(
        "Experts implementation switched",
        "transformers' eager loop over experts never reaches a graph; grouped or batched matmuls on the same "
        "weights do. `Config(captures_loops=False)` leaves the model as it is.",
        words=("experts implementation switched",),
    ),
    Symptom(
        "Expert loops captured, or code with data-dependent shapes outside the graph",
        "Dynamo's flags for data-dependent shapes were tried at the first call and kept where they helped. "
        "Where they did not, the note names the first obstacle.",
        words=("expert loops captured", "data-dependent shape"),
    ),
)

_VERIFICATION = (
    Symptom(
        "A region failed its verification",
        "The region stays as it was. A form that is off, or a control that did not hold, is a fault of ours: "
        "please report the line. A region that could not be recorded or run was not verified, and the message"
        " says why.",
        words=("verification failed",),
        sources=("passes/verify/region.py", "memfine_fx/compiler/verifier.py"),
        kinds=("refusal", "verification"),
    ),
)

_REFUSALS = (
    Symptom(
        "No experts were found behind a top-k",
        "Nothing to do if this choice picks no experts: sampling, attention, lookups, an auxiliary loss. If "
        "it does, a graph break hides them (`TORCH_LOGS=graph_breaks`).",
        words=("no expert matmul depends on it", "leave the captured graph"),
    ),
    Symptom(
        "Experts of a kind that is not raised",
        "One vector an expert leaves no matmul to run by expert; experts that pick tokens are raised when "
        "their weights are stacked and multiplied by bmm or einsum; one expert for a whole sequence is raised"
        " when its choice is repeated for every token. Store experts as parameters [E,in,out] where they are "
        "stored flat.",
        words=(
            "its experts are rows of a table",
            "it picks tokens",
            "one expert for all tokens of a sequence",
            "dispatch by mask or one-hot",
            "no known spelling of experts",
            "no token-indexed input or no expert parameters",
        ),
    ),
    Symptom(
        "Experts' results stay apart",
        "Only layers that add up a token's experts into [T,H] are chunked. Read the combined output; what "
        "reads routed rows keeps all of them alive.",
        words=(
            "do not meet in one",
            "not rows combined into tokens",
            "rows of several dimensions",
            "also used outside the region",
            "used apart from the others",
            "not put together in one tensor",
            "the combined output is read after",
            "reshaped before they leave",
            "rows leave the experts in other slots",
        ),
    ),
    Symptom(
        "Random numbers inside the experts",
        "A recomputed chunk would draw others: move dropout behind the combined output, or set it to 0 in the experts.",
        words=("random numbers are drawn",),
    ),
    Symptom(
        "detach, autocast or no_grad inside the experts",
        "Detach outside the experts, and enter autocast or no_grad around the whole layer.",
        words=("stops gradients inside the region", "autocast or gradient mode changes"),
    ),
    Symptom(
        "A chunked layer would have other gradients than the layer as written",
        "When a layer is first compiled, its backward in chunks is compared on a few tokens with autograd through the "
        "layer as captured. The two differ, so something inside stops or changes gradients that the graph does not "
        "show: a function that Dynamo keeps whole (`allow_in_graph`), or a torch that records it in a new way. The "
        "layer runs as it was written, exactly. Take that function out of the experts; if there is none, please "
        "report it with this line.",
        words=("other gradients than autograd",),
    ),
    Symptom(
        "A head (the logits' projection with its loss) is not chunked",
        "The loss must be a mean or sum of cross entropy over labels, in float32, of logits that a projection makes "
        "and nothing else reads. Logits that are returned or used elsewhere have to exist whole: do not return them in "
        "training, or accept the head as it was written.",
        sources=("passes/head/find.py",),
    ),
    Symptom(
        "Something between dispatch and combine is opaque",
        "An `autograd.Function` or a checkpoint between them is not looked into: put it around the layer.",
        words=("captured whole", "the region holds a", "node has no row-wise rule", "holds a … node"),
        kinds=("refusal",),
    ),
    Symptom(
        "Tensors are written in place",
        "Write into a new tensor instead of an input of the experts, and not into the output from outside.",
        words=("in place", "something outside writes", "are not fresh", "not fresh", "that are not fresh"),
        kinds=("refusal",),
    ),
    Symptom(
        "Experts of a loop differ",
        "Experts must be the same computation, each with weights of its own of one shape, layout and dtype, "
        "to share one loop; every expert from 0 on must take its rows and write them back in the same way.",
        sources=("passes/loops/",),
    ),
    Symptom(
        "Tokens interact",
        "Rows must be independent of one another within the experts: no norm, softmax, sum or running count "
        "across rows. A capacity that drops tokens belongs before the experts, as in the capacity models of "
        "[Coverage](coverage.md).",
        words=(
            "tokens interact",
            "mixes rows",
            "rows are not independent",
            "varies along the routed dimension",
            "differs between rows",
            "mix rows",
        ),
    ),
    Symptom(
        "An unchosen expert is not proved to add nothing",
        "The layer runs every expert on every token and weighs results. It is chunked as a routed layer where"
        " the weights of unchosen experts are exactly zero by masking or scattering, and experts without "
        "biases keep them so.",
        words=("not proved zero",),
        sources=("passes/dense_weights.py",),
    ),
    Symptom(
        "The order or shape of routed rows could not be followed",
        "The proof follows each dimension from the routing to the output: sort by expert id, gather rows, "
        "apply the experts, put rows back or add them to tokens. The node in the report is where it ended. A "
        "spelling that is right and refused is worth a report, with the layer's code.",
        sources=("passes/dispatch.py", "passes/moves.py", "passes/rowwise.py", "passes/layouts.py", "passes/families/"),
    ),
    Symptom(
        "The layer's graph could not be read",
        "Shapes are missing, tokens are not [T,H], or retracing failed; `MEMFINE_DUMP=folder` writes the graphs.",
        words=("retracing", "grouped matmul", "no recorded tensor", "tokens of shape"),
        kinds=("refusal",),
    ),
    Symptom(
        "Grouped bodies are not used",
        "Logged only, on CUDA: such experts run one by one in each chunk, with the same results.",
        sources=("passes/lower/lift.py",),
    ),
    Symptom(
        "Two regions share a dispatch",
        "The other region is chunked; give this one a dispatch of its own.",
        words=("shares its dispatch",),
    ),
    Symptom(
        "Sharded experts that are not raised",
        "With `expert_parallel` the tables must reach the experts unchanged, and the model must leave moving "
        "rows to memfine_fx.",
        sources=("passes/lower/sharded.py",),
    ),
)

_COMMANDS = (
    Symptom(
        "memfine explain does not find the model",
        "Give `hf:MODEL_TYPE` of an installed transformers, or `path/to/file.py:factory` where the factory "
        "returns a module, or (module, inputs).",
        sources=("memfine_fx/cli.py", "memfine_fx/demo/tiny.py"),
    ),
    Symptom(
        "A file of rows or the demo's arguments are not accepted",
        "The message names the file or the argument.",
        sources=("memfine_fx/plan/front.py", "memfine_fx/demo/"),
    ),
    Symptom(
        "A command or a module is called otherwise now",
        "The former name still works; the line says today's.",
        words=("is called plan", "memfine_fx.cluster is"),
    ),
    Symptom(
        "memfine plan training refuses its input",
        "The message names the field, the value and what is known ([Planning a cluster](cluster.md)).",
        sources=("memfine_fx/planning/",),
    ),
)

SECTIONS = (
    Section("Nothing is said", "Symptoms that come without a message.", _SILENT),
    Section(
        "Warnings",
        "Each is given once a model or a process, not once a step; training goes on and is right.",
        _WARNINGS,
    ),
    Section(
        "Errors while training",
        "Every error is a `memfine_fx.MemfineError`; the class in front of the message says which.",
        _TRAINING,
    ),
    Section(
        "Errors of options and arguments",
        'Given where the option is made, before anything is compiled; `backend="memfine"` gives them at the '
        "first call.",
        _OPTIONS,
    ),
    Section(
        "Notes of a report",
        "What was changed so that the experts reach a graph; nothing to do, unless it surprises.",
        _NOTES,
    ),
    Section("Verification", "Of `memfine_fx.verify` and `optimize(..., verify=True)`.", _VERIFICATION),
    Section(
        "Refusals",
        "Lines `refused` in a report or in `memfine explain`. The layer runs as it was written, and its "
        "gradients are those of the unmodified model. What is raised is listed in [Coverage](coverage.md).",
        _REFUSALS,
    ),
    Section(
        "The command line and the planners",
        "`memfine` prints its errors as one line and ends with status 2.",
        _COMMANDS,
    ),
)
