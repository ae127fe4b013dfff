"""Errors and refusals of memfine_fx. No torch is loaded here, so that a command can refuse an option at once.

`ConfigError` and `BudgetInfeasible` reach the user, and so does `runtime.halving.ChunkOutOfMemory`, an error of torch
too. `CannotChunk` never does: it is raised where a graph leaves what a pass can prove, caught once per region by the
pipeline, and printed by the report; the user's graph stays as it was.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Self

from memfine_fx.units import budget_text, readable_bytes

__all__ = [
    "BudgetInfeasible",
    "CannotChunk",
    "CompatibilityWarning",
    "ConfigError",
    "DoubleBackwardError",
    "ExchangeFailed",
    "GuardRefused",
    "LeftoverShapes",
    "MemfineError",
    "MissingCompiler",
    "MissingPackage",
    "RanksDisagree",
    "Reason",
    "RoutingReplayError",
]


class Reason(enum.Enum):
    """Why something stays as it was written; the value is what a user can do about it, in one sentence.

    docs/troubleshooting.md lists under each what exactly can have been seen.
    """

    NO_EXPERTS = (
        "nothing to do if this choice picks no experts (sampling, attention, lookups); if it does, a graph break hides "
        "them, and TORCH_LOGS=graph_breaks shows it"
    )
    GRAPH_BREAK = (
        "something between the router and the experts cannot be captured: TORCH_LOGS=graph_breaks shows what; "
        "in transformers, model.set_experts_implementation('grouped_mm') is captured whole, torchao's tensors excepted"
    )
    EXPERTS_ARE_VECTORS = (
        "one vector an expert leaves no matmul to run per expert (product-key retrieval); experts that are stored flat "
        "are raised as parameters [E,in,out]"
    )
    EXPERTS_CHOOSE_TOKENS = (
        "nothing to do where the picked tokens meet one dense block or attention; experts that choose tokens are "
        "raised when their weights are stacked, [E,in,out], and multiplied by bmm or einsum"
    )
    CHOSEN_FOR_SEQUENCES = "run each expert on its own sequences, or repeat the choice for every token, [T] ids"
    UNKNOWN_ROUTER = (
        "choose experts by topk, argmax, argmin, max or min along one dimension; an operator that chooses otherwise is "
        "worth a report"
    )
    UNKNOWN_SPELLING = "see docs/coverage.md for the spellings that are raised"
    INDEX_NOT_FOLLOWED = (
        "what an index names was lost: sort by expert id, count with bincount or histc, gather by the sorted order; "
        "see docs/coverage.md for the spellings that are raised"
    )
    ROWS_NOT_FOLLOWED = (
        "the order or shape of routed rows was lost here; a layer that keeps its rows apart and is refused is worth a "
        "report with its code"
    )
    COMBINE_NOT_FOLLOWED = (
        "add each token's rows to zeros [T,H] (index_add, scatter_add), or undo the sort and sum over the choices"
    )
    RESULTS_APART = (
        "only layers that add up a token's experts are chunked; experts whose results stay apart (attention experts, a "
        "result per head) run as written"
    )
    ROWS_LEAVE = (
        "what reads the routed rows keeps all of them alive, so chunks would save nothing: read the combined output"
    )
    TOKENS_INTERACT = (
        "rows must be independent: a sum, norm or running count over tokens makes chunks depend on one another"
    )
    NOT_PROVED_ZERO = (
        "an expert that a token did not choose must add exactly zero: weigh its results by weights that are zero there"
    )
    EXPERTS_DIFFER = "experts must be the same computation with weights of their own to share one loop"
    LAYOUTS_DIFFER = "experts of one width and layout share one loop; these do not"
    RANDOM_NUMBERS = (
        "a recomputed chunk would draw others: move dropout behind the combined output, or set it to 0 in the experts "
        "(lora_dropout=0 of adapters on them)"
    )
    GRADIENTS_STOP = "gradients through a detached value cannot be recomputed in chunks: detach outside the experts"
    MODES_CHANGE = "enter autocast or no_grad around the whole MoE layer, not inside it"
    BODY_NOT_RUN = (
        "a loop is captured if what it skips for an expert without rows can be run for it: let the body bind names and "
        "write into tensors only, and skip it by a mask, a count or a number of rows of that expert"
    )
    NOT_CAPTURED = (
        "TORCH_LOGS=recompiles,graph_breaks shows where Dynamo gives up on a layer: at a graph break in a loop, or at "
        "torch._dynamo.config.recompile_limit, which memfine_fx.optimize raises and torch.compile leaves at 8; a layer "
        "that has not run yet is captured when it does"
    )
    OTHER_OUTPUT = "your layer runs as it was; please report it with this line and the layer's code"
    OTHER_GRADIENTS = (
        "your layer runs as it was; take what changes gradients out of the experts, or report it with this line"
    )
    OPAQUE = (
        "an autograd.Function or checkpoint between dispatch and combine is not looked into: put it around the layer"
    )
    WRITTEN_IN_PLACE = "write into a new tensor instead of an input of the experts"
    NO_RULE = "an operation inside the experts is not known to treat rows one by one; please report it"
    UNREADABLE = (
        "the graph lacks shapes or could not be run on fake tensors; MEMFINE_DUMP=folder writes it for a report"
    )
    NOT_LIFTED = "such experts run one by one in each chunk, with the same results"
    SHARED_DISPATCH = "the other region is chunked; give this one a dispatch of its own"
    SHARDED = "with expert_parallel, tables reach the experts unchanged and the model leaves moving rows to memfine_fx"
    VERIFICATION_FAILED = "a rewrite gave other numbers than your model: please report it with this line"
    INTERNAL_ERROR = "your model runs as it was; please report it with this line"
    HEAD_UNKNOWN = (
        "a head is chunked where the loss is a mean or sum of cross entropy in float32 over labels, of logits that a "
        "projection makes"
    )
    LOSS_PER_TOKEN = "reduction='mean' or 'sum' lets the loss be computed chunk by chunk"
    LOGITS_RETURNED = (
        "memfine_fx.Config(returns_logits=False) gives them up in training: the output's logits are then None"
    )
    LOGITS_USED = (
        "what reads all logits needs all of them at once: take it out of the training step, or compute it now and then"
    )
    NO_GRADIENTS_WANTED = "nothing: logits are given up in training only"

    @property
    def hint(self) -> str:
        return self.value


class MemfineError(Exception):
    """Base of every error that memfine_fx raises on purpose."""


class ConfigError(MemfineError, ValueError):
    """An option, budget or argument is malformed; the message names the value and what is accepted."""


class MissingPackage(MemfineError, ImportError):
    """A package outside the core dependencies is needed; the message names the extra that brings it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed; "
            f"install it with: pip install 'memfine-fx[{extra}]'"
        )


class MissingCompiler(MemfineError, RuntimeError):
    """Inductor compiles C++ for a CPU, and this machine has no C++ compiler that works.

    Args:
        cause: what torch said, which names the compilers that it tried.
    """

    def __init__(self, cause: str) -> None:
        super().__init__(
            f"Inductor compiles for a CPU with a C++ compiler, and none works here ({cause}). Install g++, or name "
            "another compiler in the environment variable CXX, and start the process again; without a compiler, "
            'memfine_fx.optimize(model, inner_backend="aot_eager") chunks the same layers and compiles no C++.'
        )


class DoubleBackwardError(MemfineError, RuntimeError):
    """A second derivative was asked for through a chunked region."""


class RoutingReplayError(MemfineError, RuntimeError):
    """A routing cannot be recorded, or not be replayed as it was asked for."""


class CannotChunk(MemfineError):
    """A region cannot be rewritten.

    Args:
        reason: of which kind, which says what a user can do.
        details: what was seen and what was expected, in words.
        node: the graph node where the proof stopped, if there is one; the attribute `node` is its text, `at` itself.
    """

    def __init__(self, reason: Reason, details: str, node: object | None = None) -> None:
        super().__init__(details)
        self.reason = reason
        self.details = details
        self.at, self.node = node, None if node is None else str(node)

    def __str__(self) -> str:
        return self.details if self.node is None else f"{self.details} [at {self.node}]"

    def placed(self, node: object) -> Self:
        """Set the graph node where the proof stopped, if none is known yet, and return the exception."""
        if self.at is None:
            self.at, self.node = node, str(node)
        return self


class LeftoverShapes(MemfineError):
    """A capture flag let something into a graph that no region swallows; never reaches the user."""


class GuardRefused(LeftoverShapes):
    """A loop cannot be run for every expert, because a body that it skips for some would do something; never reaches
    the user.

    Args:
        reason: what the body would do.
        where: the condition that skips it, "file:line".
        module: path of the module whose code it is.
    """

    def __init__(self, reason: str, where: str, module: str) -> None:
        super().__init__(f"{reason} ({where})")
        self.reason, self.where, self.module = reason, where, module


class BudgetInfeasible(MemfineError):
    """No plan fits the memory budget.

    Args:
        budget_bytes: what was asked for.
        minimum_bytes: the smallest budget with a plan that fits.
        largest_terms: (name, bytes) of what fills it, largest first.
    """

    def __init__(self, budget_bytes: int, minimum_bytes: int, largest_terms: Sequence[tuple[str, int]]) -> None:
        self.budget_bytes = budget_bytes
        self.minimum_bytes = minimum_bytes
        self.largest_terms = tuple(largest_terms)
        terms = ", ".join(f"{name} {readable_bytes(num_bytes)}" for name, num_bytes in self.largest_terms)
        super().__init__(
            f"memory_budget={budget_bytes} ({readable_bytes(budget_bytes)}) cannot be met: the smallest budget that "
            f"fits is {minimum_bytes} ({readable_bytes(minimum_bytes)}). Largest terms: {terms}. Raise memory_budget "
            f'to "{budget_text(minimum_bytes)}", or make the batch or sequence smaller.'
        )


class ExchangeFailed(MemfineError, RuntimeError):
    """A rank of an expert parallel group did not take part in an exchange of rows: it died, hangs or left the step.

    Args:
        place: round, pass and layer.
        rank: of this process in the group.
        num_ranks: of the group.
        cause: what torch.distributed said.
    """

    def __init__(self, place: str, rank: int, num_ranks: int, cause: str) -> None:
        self.place = place
        self.cause = cause
        super().__init__(
            f"expert parallel exchange failed on rank {rank} of {num_ranks} in {place}: another rank died, hangs, or "
            f"raised an error of its own; look at the other ranks' output first. torch.distributed said: {cause}"
        )


class RanksDisagree(MemfineError, RuntimeError):
    """Ranks of an expert parallel group run different models, configs or layers; the message says what differs.

    Every rank of the group raises it at the same place, and the process group can be used further. A rank that could
    not go on raises its own error instead, and the others learn of it.
    """


class CompatibilityWarning(UserWarning):
    """A host (torch, transformers, accelerate, PEFT) differs from what was tested; the message says what is lost."""
