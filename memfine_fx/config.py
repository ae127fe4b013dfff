"""Options of the compiler: one frozen record, checked where it is made.

Environment variables are read here and nowhere else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from memfine_fx.errors import ConfigError
from memfine_fx.units import bytes_of_text

__all__ = ["LEAST", "Axis", "Config", "InnerBackend", "MemoryBudget", "PassName", "budget_as_written", "parse_budget"]

Axis = Literal["rows", "tokens"]
IdleGradients = Literal["zero", "none"]
InnerBackend = Literal["inductor", "aot_eager", "eager"]
MemoryBudget = int | float | str | None
PassName = Literal[
    "guards", "regions", "heads", "fold_weight", "low_rank", "lift", "save_rows", "fuse_gradients", "partition",
    "region_distance", "kernel_order",
]  # fmt: skip
"""See `passes.pass_list.PASSES`."""

LEAST = "least"
"""As a memory budget: no limit, and regions save nothing of routed rows, also where keeping would leave the peak of a
step where it is."""

_OPTIONS = "MEMFINE_OPTIONS"
_WORDS = {"true": True, "false": False, "none": None}
_FLAGS = ("captures_loops", "returns_logits", "verify", "gives_up_comparison_with_eager")


@dataclass(frozen=True)
class Config:
    """How regions are chunked.

    Args:
        axis: "rows" walks the expert-sorted routed rows in chunks of at most `rows_per_chunk`;
            "tokens" is the paper's FCDA (arXiv 2511.21431, section 3): token slices, each dispatched,
            computed and combined in sequence and recomputed in backward. Under `expert_parallel` ranks agree
            upon the number of slices in each step, and `rows_per_chunk` is what the paper calls s'_max.
        rows_per_chunk: routed rows in one chunk, R. None lets the planner choose.
        tokens_per_chunk: tokens in one slice of axis "tokens". None derives it from R and top-k.
        bins: numbers of chunks to choose among at run time, as the paper's (1, 2, 4, 8); None takes the exact
            number that the rows of the step require.
        memory_budget: see `parse_budget`; bounds the peak bytes of a training step on one device. None saves of
            routed rows for backward what leaves that peak where it is; on a CUDA device it is what that has left for
            the step, which nothing is refused for. "least" saves nothing.
        inner_backend: what compiles the rewritten graph and the compiled experts.
        captures_loops: let `optimize` and `explain` try Dynamo's flags for data-dependent shapes, and switch
            transformers models from an eager expert loop to a spelling that reaches a graph.
        chunks_head: chunk a language model's head (projection and cross-entropy) over tokens: None where its vocabulary
            is large, True always, False never.
        tokens_per_head_chunk: tokens whose logits exist at once. None lets the planner choose.
        returns_logits: False gives up logits that a model returns beside its loss, as transformers' models do: where
            gradients are wanted and labels are given, the output's logits are then None, and never exist whole.
        idle_gradients: of experts that are modules or parameters of their own and get no rows: "zero", or "none" as in
            a loop that skips them, so that an optimizer leaves them alone (AdamW's decay, momentum). Experts on several
            ranks and parameters with hooks have zeros all the same. On a GPU, "none" waits for the device once a layer.
        verify: at first compile, run every region's original and rewritten form on the inputs at hand and on
            adversarial routings, forward and backward, and leave a region as it was when they disagree.
        gives_up_comparison_with_eager: do not compare each kind of chunked layer with the module's own code, run
            eagerly on a few tokens when it is first compiled. What a capture lost is not noticed then.
        disable_passes: names of passes that are skipped, to find out what one of them does. Results are the same.
    """

    axis: Axis = "rows"
    rows_per_chunk: int | None = None
    tokens_per_chunk: int | None = None
    bins: tuple[int, ...] | None = None
    memory_budget: MemoryBudget = None
    inner_backend: InnerBackend = "inductor"
    captures_loops: bool = True
    chunks_head: bool | None = None
    tokens_per_head_chunk: int | None = None
    returns_logits: bool = True
    idle_gradients: IdleGradients = "zero"
    verify: bool = False
    gives_up_comparison_with_eager: bool = False
    disable_passes: tuple[PassName, ...] = ()

    def __post_init__(self) -> None:
        _check_choice("axis", self.axis, get_args(Axis))
        _check_choice("inner_backend", self.inner_backend, get_args(InnerBackend))
        _check_choice("idle_gradients", self.idle_gradients, get_args(IdleGradients))
        for name in ("rows_per_chunk", "tokens_per_chunk", "tokens_per_head_chunk"):
            _check_positive(name, getattr(self, name))
        _check_bins(self.bins)
        if self.bins is not None and self.tokens_per_chunk is not None:
            raise ConfigError("Config.bins and Config.tokens_per_chunk both set the number of token slices; give one")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"Config.{name} must be a bool, got {getattr(self, name)!r}")
        if self.chunks_head is not None and not isinstance(self.chunks_head, bool):
            raise ConfigError(f"Config.chunks_head must be None or a bool, got {self.chunks_head!r}")
        parse_budget(self.memory_budget)
        if not isinstance(self.disable_passes, tuple):
            raise ConfigError(f"Config.disable_passes={self.disable_passes!r} must be a tuple of names of passes")
        for name in self.disable_passes:
            _check_choice("disable_passes", name, get_args(PassName))

    @property
    def has_budget(self) -> bool:
        """Whether the user limits the bytes of a step."""
        return self.memory_budget not in (None, LEAST)

    @staticmethod
    def from_options(options: Mapping[str, Any] | None) -> Config:
        """The config of `torch.compile(..., backend="memfine", options=...)`.

        A ready `Config` may be passed under the key "config"; the other keys override its fields. Without one, fields
        that are not given are those of MEMFINE_OPTIONS.

        Raises:
            ConfigError: an unknown key or a malformed value.
        """
        fields = dict(options or {})
        base = fields.pop("config", None) or Config.from_environment()
        if not isinstance(base, Config):
            raise ConfigError(f"options['config'] must be a memfine_fx.Config, got {type(base).__name__}")
        _check_names(fields)
        return dataclasses.replace(base, **fields)

    @staticmethod
    def from_environment() -> Config:
        """The config of MEMFINE_OPTIONS: what holds where no config is given in Python.

        The variable is a list such as "memory_budget=20GiB,returns_logits=false,bins=1/2/4", by the names of the
        fields; "none" stands for None. Without the variable all fields have their defaults.

        Raises:
            ConfigError: it is malformed; names the variable and says what would do.
        """
        text = os.environ.get(_OPTIONS, "")
        try:
            fields = dict(_named_value(entry) for entry in text.split(",") if entry.strip())
            _check_names(fields)
            return Config(**{name: _value(name, written) for name, written in fields.items()})
        except ConfigError as error:
            raise ConfigError(f"{_OPTIONS}={text!r}: {str(error).replace('Config.', '')}") from error


def parse_budget(budget: MemoryBudget, device_bytes: int | None = None) -> int | None:
    """Bytes of a memory budget in any of its forms.

    Args:
        budget: None, "least", "20GiB" / "800MB" / "1.5G", an int of bytes, or a float in (0, 1] of the device.
        device_bytes: memory of the device, for the float form; the float form is only checked without it.

    Returns:
        Bytes, or None where no limit was given (or a fraction cannot be resolved yet).

    Raises:
        ConfigError: the value has none of these forms.
    """
    accepted = "None, an int of bytes, a float in (0, 1] of device memory, 'least', or text such as '20GiB' or '800MB'"
    if budget is None or budget == LEAST:
        return None
    if isinstance(budget, bool):
        raise ConfigError(f"memory_budget={budget!r} is not a budget; expected {accepted}")
    if isinstance(budget, int):
        if budget <= 0:
            raise ConfigError(f"memory_budget={budget!r} must be positive; expected {accepted}")
        return budget
    if isinstance(budget, float):
        if not 0.0 < budget <= 1.0:
            raise ConfigError(f"memory_budget={budget!r} is not a fraction in (0, 1]; expected {accepted}")
        return None if device_bytes is None else int(budget * device_bytes)
    if isinstance(budget, str):
        num_bytes = bytes_of_text(budget)
        if num_bytes <= 0:
            raise ConfigError(f"memory_budget={budget!r} is not understood; expected {accepted}")
        return num_bytes
    raise ConfigError(f"memory_budget={budget!r} is not a budget; expected {accepted}")


def budget_as_written(text: str) -> MemoryBudget:
    """A budget that was written as text: "0.8" and "123456" are numbers."""
    return _number(text)


def dump_folder() -> str | None:
    """Folder for numbered dumps of graphs as captured and as rewritten (MEMFINE_DUMP), or None."""
    return os.environ.get("MEMFINE_DUMP") or None


def log_names(known: tuple[str, ...]) -> list[str]:
    """Logs to switch on (MEMFINE_LOGS, names separated by commas; "all" for every one).

    Raises:
        ConfigError: a name is not among `known`.
    """
    names = [name.strip() for name in os.environ.get("MEMFINE_LOGS", "").split(",") if name.strip()]
    if "all" in names:
        return list(known)
    for name in names:
        if name not in known:
            raise ConfigError(f"MEMFINE_LOGS names {name!r}; known: {', '.join(known)}, all")
    return names


def asked_gpu_kernels() -> bool | None:
    """Whether experts on CUDA devices may run in the GPU kernels (MEMFINE_GPU_KERNELS, 0 or 1), see docs/gpu.md.

    None where nothing is said: then they do on devices on which models were measured in them, where they are faster.

    Raises:
        ConfigError: it is neither 0 nor 1.
    """
    written = os.environ.get("MEMFINE_GPU_KERNELS") or None
    if written not in (None, "0", "1"):
        raise ConfigError(f"MEMFINE_GPU_KERNELS={written!r} is unknown; expected 0 or 1")
    return None if written is None else written == "1"


def is_quiet() -> bool:
    """Return whether nothing is said on stderr of what takes long (MEMFINE_QUIET, 0 or 1), see `progress`.

    Without the variable nothing is said by ranks other than the first, and in tests that pytest runs.

    Raises:
        ConfigError: it is neither 0 nor 1.
    """
    written = os.environ.get("MEMFINE_QUIET") or None
    if written not in (None, "0", "1"):
        raise ConfigError(f"MEMFINE_QUIET={written!r} is unknown; expected 0 or 1")
    if written is not None:
        return written == "1"
    return "PYTEST_CURRENT_TEST" in os.environ or os.environ.get("RANK", "0") != "0"


def cache_folder() -> str:
    """Return the folder for what is measured once a machine (MEMFINE_CACHE), in the user's cache by default.

    Raises:
        FileNotFoundError: the folder is below a home folder, and the user has none.
    """
    written = os.environ.get("MEMFINE_CACHE") or os.path.join("~", ".cache", "memfine_fx")
    folder = os.path.expanduser(written)
    if folder.startswith("~"):  # it would be a folder of this name in the current one
        raise FileNotFoundError(f"no home folder is known, and the folder is {written}")
    return folder


def _check_names(fields: Mapping[str, object]) -> None:
    known = {field.name for field in dataclasses.fields(Config)}
    unknown = sorted(set(fields) - known)
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]!r} for backend 'memfine'; known: {sorted(known)}")


def _named_value(entry: str) -> tuple[str, str]:
    name, separator, value = (part.strip() for part in entry.partition("="))
    if not separator or not name or not value:
        raise ConfigError(f"{entry.strip()!r} is not NAME=VALUE; entries are separated by commas")
    return name, value


def _value(name: str, written: str) -> Any:
    """Return the value of a field from its text: a number, a word such as "true", or a list such as "1/2/4"."""
    if written.lower() in _WORDS and name != "idle_gradients":
        return _WORDS[written.lower()]
    if name in ("bins", "disable_passes"):
        return tuple(_number(part) for part in written.split("/"))
    return _number(written)


def _number(written: str) -> int | float | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(written)
    return written


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"Config.{name}={value!r} is unknown; expected one of {list(choices)}")


def _check_positive(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"Config.{name}={value!r} must be a positive int")


def _check_bins(bins: object) -> None:
    if bins is None:
        return
    sizes = bins if isinstance(bins, tuple) else ()
    is_valid = all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes)
    if not sizes or not is_valid or list(sizes) != sorted(set(sizes)):
        raise ConfigError(
            f"Config.bins={bins!r} must be a tuple of rising positive ints, such as (1, 2, 4, 8), or None"
        )
