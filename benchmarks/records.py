"""What is measured (Job) and what came out (Row), as frozen records that go to JSON and back."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

UNAVAILABLE = "unavailable: "
_OUT_OF_MEMORY_SIGNS = (
    "out of memory",
    "outofmemory",
    "can't allocate",
    "cannot allocate memory",
    "bad_alloc",
    "memoryerror",
    "signal 9",
)


@dataclass(frozen=True)
class Sizes:
    """T = batch * sequence tokens, H hidden, F width, E experts, K top_k, N = T * K routed rows."""

    batch: int
    sequence: int
    hidden: int
    width: int
    experts: int
    top_k: int
    layers: int = 1
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    vocab: int = 0

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    @property
    def routed_rows(self) -> int:
        return self.tokens * self.top_k

    def __str__(self) -> str:
        text = f"T={self.tokens} H={self.hidden} F={self.width} E={self.experts} K={self.top_k}"
        if self.vocab > 4 * self.hidden:  # else logits are no larger than what the layers make
            text += f" V={self.vocab}"
        return text if self.layers == 1 else f"{self.layers} layers, {self.batch}x{self.sequence}, {text}"


@dataclass(frozen=True)
class Job:
    """One workload under one peer: what a worker process is told."""

    suite: str
    workload: str  # a name of benchmarks.workloads
    peer: str
    sizes: Sizes
    dtype: str
    device: str
    seed: int
    steps: int
    source: str = ""  # digest of memfine_fx where the peer runs it: a changed compiler is another job
    load: str = ""  # how rows fall on experts (benchmarks.loads); "" leaves it to the random router
    points: tuple[str, ...] = ()  # of a sweep: what this one process goes through
    limit_bytes: int = 0  # of a search: what the step's peak may be

    @property
    def kind(self) -> str:
        """Its workload without what follows a colon, the architecture of a model."""
        return self.workload.partition(":")[0]

    @property
    def key(self) -> str:
        """Equal for equal jobs, in every process. Options added later count only where they are set."""
        fields = asdict(self)
        for name in ("load", "points", "limit_bytes"):
            if not fields[name]:
                del fields[name]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def table(self) -> str:
        """Jobs with the same title are compared in one table."""
        load = f", load {self.load}" if self.load else ""
        if self.points:
            load += f", from {self.points[0]} to {self.points[-1]} (figures of the last)"
        if self.limit_bytes:
            load += f", within {self.limit_bytes:,} B"
        return f"{self.suite}: {self.workload}, {self.sizes}{load}, {self.dtype} on {self.device}"

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Job":
        return cls(
            **{**fields, "sizes": Sizes(**fields["sizes"]), "points": tuple(fields.get("points", ()))},
        )


@dataclass(frozen=True)
class Machine:
    """Where a row comes from."""

    processor: str
    cores: int
    threads: int
    device: str
    python: str
    torch: str
    transformers: str

    def __str__(self) -> str:
        return (
            f"{self.processor}, {self.cores} cores, {self.threads} threads, {self.device}; python {self.python}, "
            f"torch {self.torch}, transformers {self.transformers}"
        )


@dataclass(frozen=True)
class Measurement:
    """One worker's figures. Bytes are beyond what existed before the step, as each field says."""

    step_seconds: tuple[float, ...]
    cold: bool  # the compile cache was empty
    peak_bytes: int  # beyond parameters and gradients; the step makes the gradients (zero_grad's default)
    value: float  # loss, or the output's product with a fixed probe
    gradient_norm: float
    gradient_checksum: float
    matmul_flops_per_second: float
    compile_seconds: float = 0.0  # warm-up steps beyond their usual time
    accumulating_peak_bytes: int | None = None  # the same peak, where gradients exist already and are accumulated into
    whole_peak_bytes: int | None = None  # beyond parameters: the gradients that the step makes are among them
    allocated_bytes: int | None = None  # CUDA: all of the process, at the peak
    reserved_bytes: int | None = None  # CUDA: what the caching allocator held of the device
    largest_bytes: int | None = None  # one allocation of a step, the largest
    gradient_error: float | None = None  # largest relative error of a tensor against fp32, where measured
    graphs: int = 0
    recompilations: int | None = None  # in five further shapes, where measured
    series: dict[str, tuple[float, ...]] = field(default_factory=dict)  # figures by point, layer or moment

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Measurement":
        known = {
            name: value for name, value in fields.items() if name in cls.__dataclass_fields__
        }  # old rows have more
        series = {name: tuple(numbers) for name, numbers in fields.get("series", {}).items()}
        return cls(**{**known, "step_seconds": tuple(fields["step_seconds"]), "series": series})


@dataclass(frozen=True)
class Row:
    """One finished job of one round: a measurement, or what went wrong."""

    job: Job
    round: int
    machine: Machine | None = None
    measurement: Measurement | None = None
    error: str | None = None

    @property
    def is_out_of_memory(self) -> bool:
        text = (self.error or "").lower()
        return any(sign in text for sign in _OUT_OF_MEMORY_SIGNS)

    @property
    def is_unavailable(self) -> bool:
        """The peer cannot run here; why is in the error."""
        return (self.error or "").startswith(UNAVAILABLE)

    @property
    def is_finished(self) -> bool:
        """A result: figures, or that memory ran out. Anything else is tried again."""
        return self.error is None or self.is_out_of_memory

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Row":
        fields = json.loads(text)
        return cls(
            job=Job.from_dict(fields["job"]),
            round=fields["round"],
            machine=Machine(**fields["machine"]) if fields["machine"] else None,
            measurement=Measurement.from_dict(fields["measurement"]) if fields["measurement"] else None,
            error=fields["error"],
        )
