"""Options of torch's configuration modules that compilations of ours run under."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memfine_fx.compat.checks import Feature, expect

__all__ = [
    "ACTIVATION_BUDGET",
    "AUTOGRAD_CACHE",
    "CAPTURE_FLAGS",
    "CONSTANT_FLOATS",
    "CONSTANT_INTEGERS",
    "DEBUG_LOGGING",
    "EVERY_SIZE",
    "RECOMPILE_LIMIT",
    "RECOMPUTED_POINTWISE",
    "RECORDING",
    "WHOLE_GRAPHS",
    "Setting",
    "ignoring_debug_logging",
    "logging_option",
]

_DYNAMO, _FUNCTORCH = "torch._dynamo.config", "torch._functorch.config"


@dataclass(frozen=True)
class Setting(Feature):
    """Options of one configuration module.

    Args:
        module: its name.
        values: the value that `applied` gives each option.
    """

    module: str = ""
    values: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def config(self) -> Any:
        return importlib.import_module(self.module)

    def applied(self, values: Mapping[str, Any] | None = None) -> contextlib.AbstractContextManager[object]:
        """Return a context manager inside of which the options have these values; nothing changes where torch has no
        such option.

        Args:
            values: in the place of the setting's own.
        """
        if not self.holds():
            return contextlib.nullcontext()
        patched: contextlib.AbstractContextManager[object] = self.config.patch(dict(values or self.values))
        return patched


def _setting(module: str, values: Mapping[str, Any], *, purpose: str, fallback: str, since: str = "2.11") -> Setting:
    def check() -> None:
        config = importlib.import_module(module)
        for name in values:
            value = getattr(config, name)
            with config.patch({name: value}):
                expect(getattr(config, name) == value, f"{name} cannot be set")

    name = f"{module}.{next(iter(values))}"
    return Setting(name, "torch", purpose, (since, "2.15"), fallback, check, module, values)


class _IgnoredFunctions(dict[Any, None]):
    """Functions as keys, and no items: torch 2.11 writes its settings as JSON after every compilation, and where
    functions are among them logs an error whose traceback keeps the model alive."""

    def items(self) -> Any:
        return {}.items()


def logging_option() -> str:
    """Return the name of the option for functions that Dynamo ignores, which torch renamed in 2.12."""
    config = importlib.import_module(_DYNAMO)
    return "ignore_logging_functions" if hasattr(config, "ignore_logging_functions") else "ignore_logger_methods"


def _check_logging_option() -> None:
    functions = getattr(importlib.import_module(_DYNAMO), logging_option())
    expect(isinstance(functions, (set, dict)), f"functions to ignore are a {type(functions).__name__}")


def ignoring_debug_logging() -> contextlib.AbstractContextManager[object]:
    """Return a context manager inside of which what code logs at DEBUG breaks no graph, and is not written."""
    if not DEBUG_LOGGING.holds():
        return contextlib.nullcontext()
    name = logging_option()
    ignored = _IgnoredFunctions(dict.fromkeys([*getattr(DEBUG_LOGGING.config, name), logging.Logger.debug]))
    return DEBUG_LOGGING.applied({name: ignored})


RECOMPILE_LIMIT = _setting(
    _DYNAMO,
    {"recompile_limit": 8, "accumulated_recompile_limit": 256},
    purpose="models of many equal layers whose graphs break between these: each is a compilation of the same code",
    fallback="Where graphs break between equal layers, Dynamo compiles the first eight; the others run as written, and "
    "the report counts them.",
)
CAPTURE_FLAGS = _setting(
    _DYNAMO,
    {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True},
    purpose="loops over experts in one graph: each expert takes as many rows as the routing gives it",
    fallback="Loops over experts that take rows by the routing stay outside the graphs, and are not chunked.",
)
WHOLE_GRAPHS = _setting(
    _DYNAMO,
    {"optimize_ddp": False},
    purpose="graphs that DistributedDataParallel does not cut through the experts",
    fallback="Under DistributedDataParallel graphs may be cut through the experts, which are then not chunked.",
)
CONSTANT_INTEGERS = _setting(
    _DYNAMO,
    {"specialize_int": True},
    purpose="numbers of heads and of expert groups that stay constants in a model that FSDP2 shards",
    fallback="Models that FSDP2 shards may be captured with sizes that vary, and their experts then not be chunked.",
)
CONSTANT_FLOATS = _setting(
    _DYNAMO,
    {"specialize_float": True},
    purpose="reading a model's graph from its first capture: where sizes vary, a float is an input in the first",
    fallback="`memfine fit` captures most models twice, which takes longer and says the same.",
)
RECORDING = _setting(
    _DYNAMO,
    {"skip_fwd_side_effects_in_bwd_under_checkpoint": True},
    purpose="models that record router logits or hidden states under gradient checkpointing",
    fallback="Layers that record outputs (output_router_logits, output_hidden_states) under gradient checkpointing "
    "stay outside the graphs, and are not chunked.",
)
DEBUG_LOGGING = Setting(
    name="torch._dynamo.config.ignore_logging_functions",
    package="torch",
    purpose="layers that log at DEBUG between routing and experts, as those of transformers 5.6 to 5.13 do in bf16",
    seen=("2.11", "2.15"),
    fallback="Layers that log at DEBUG between routing and experts break graphs there, and are not chunked.",
    check=_check_logging_option,
    module=_DYNAMO,
)
EVERY_SIZE = _setting(
    "torch.fx.experimental._config",
    {"backed_size_oblivious": True},
    purpose="one graph for every number of tokens on a rank, 0 and 1 among them",
    fallback="Under expert_parallel a rank that gets 0 or 1 token captures a graph of its own; where that graph lacks "
    "the experts, the other ranks wait for it until their timeout.",
)
RECOMPUTED_POINTWISE = _setting(
    _FUNCTORCH,
    {
        "ban_recompute_used_far_apart": False,
        "ban_recompute_long_fusible_chains": False,
        "ban_recompute_materialized_backward": False,
        "ban_recompute_not_in_allowlist": False,
    },
    purpose="recomputing elementwise work in backward wherever that saves bytes",
    fallback="Less elementwise work is recomputed in backward, so a step takes more memory; budgets count it.",
)
ACTIVATION_BUDGET = _setting(
    _FUNCTORCH,
    {"activation_memory_budget": 1.0},
    purpose="the bytes of torch.compile under its own share of saved activations",
    fallback="`memfine fit` cannot tell what torch.compile takes under its own ratio: it shows the plain step there.",
)
AUTOGRAD_CACHE = _setting(
    _FUNCTORCH,
    {"enable_autograd_cache": False},
    purpose="compilations in which each graph passes our partitioner, which counts what a step holds: a hit in AOT "
    "autograd's cache skips it (`functorch.compile_through_cache`)",
    fallback="Where AOT autograd finds a graph in its cache, what the step holds is not known before it runs, and "
    "plans under a memory_budget are made without it.",
)
