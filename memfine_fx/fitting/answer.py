"""Answer `fit` from a config and a setup, step by step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from memfine_fx.compat.tensors import storage_id
from memfine_fx.compiler.recorder import Reads
from memfine_fx.config import Config, MemoryBudget, parse_budget
from memfine_fx.errors import ConfigError
from memfine_fx.fitting.alternatives import SHARES, Alternative, alternatives
from memfine_fx.fitting.analysis import Analysis, StaticBytes
from memfine_fx.fitting.changes import Changed, changes
from memfine_fx.fitting.devices import CUDA_TERMS, CudaTerm, device_bytes
from memfine_fx.fitting.models import expert_tensors, fake_model, held_tensors, loaded_config, num_parameters
from memfine_fx.fitting.recording import PLANS, RecordedStep, record_step
from memfine_fx.fitting.report import FitReport
from memfine_fx.fitting.setup import Setup, Train, optimizer_bytes
from memfine_fx.fitting.shortened import (
    Request,
    can_record_meanwhile,
    new_mode,
    record_shortened,
    recorded_meanwhile,
)
from memfine_fx.fitting.stack import Stack, find_stack, layer_lists
from memfine_fx.fitting.stretch import fewest_repeats, has_all_alike, is_uniform
from memfine_fx.plan.solve import largest
from memfine_fx.progress import stages
from memfine_fx.units import budget_text

__all__ = ["Question", "analyse", "analysed_plainly", "answer", "report_of", "static_bytes", "with_setup"]

_MOST_TOKENS = 1 << 24
_MOST_SEQUENCES = 1 << 16
_ESTIMATES = {
    "fsdp": "Of FSDP's own buffers the parameters that are in no layer, two gathered layers and the gradients of one "
    "are counted, as stated bytes: on several ranks every number is an estimate",
    "expert_parallel": "Buffers in which rows travel between ranks are not counted: on several ranks every number is "
    "an estimate, and too low",
}
_WITHOUT_CACHE = (
    "The key-value cache that this config lets a step return (use_cache) is not counted: Trainer sets "
    "model.config.use_cache = False, and so should a loop of your own"
)


@dataclasses.dataclass(frozen=True)
class Question:
    """A question to `fit` about a setup: the device, the routing, and what is compared.

    Args:
        memory, gpu: of the device, as bytes or by its name.
        device: "cpu" or "cuda".
        has_even_routing: rows are spread evenly over experts.
        compares: whether the same step without memfine_fx, and LoRA where nothing fits, are recorded too.
    """

    memory: MemoryBudget = None
    gpu: str | None = None
    device: str = "cpu"
    has_even_routing: bool = False
    compares: bool = False

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"device={self.device!r} is unknown; expected 'cpu' or 'cuda'")
        if isinstance(self.memory, float):
            raise ConfigError(f"memory={self.memory!r}: there is no device to take a fraction of; give bytes")
        if self.memory is not None and self.gpu is not None:
            raise ConfigError(f"memory={self.memory!r} and gpu={self.gpu!r}: give one of them")

    @property
    def memory_bytes(self) -> int | None:
        if self.gpu is not None:
            return device_bytes(self.gpu)
        try:
            return parse_budget(self.memory)
        except ConfigError as error:
            raise ConfigError(
                f"memory={self.memory!r} is not understood; expected an int of bytes, or text such as '80GiB'"
            ) from error

    @property
    def terms(self) -> tuple[CudaTerm, ...]:
        return CUDA_TERMS if self.device == "cuda" else ()

    @property
    def available(self) -> int | None:
        """Return the bytes of the memory that are left for the step itself; None where no memory was given."""
        total = self.memory_bytes
        return None if total is None else total - sum(term.num_bytes for term in self.terms)


def answer(source: object, setup: Setup, question: Question, config: Config, *, in_parallel: bool = False) -> FitReport:
    """Return the answer of `memfine_fx.fit`.

    Args:
        in_parallel: let another process record a part of the step, where that saves time.
    """
    question.memory_bytes  # noqa: B018  # an unknown device is named before anything is recorded
    source = loaded_config(source)
    stages.info("building %s of fake tensors", _name(source))
    analysis, how = analyse(source, setup, config, has_even_routing=question.has_even_routing, in_parallel=in_parallel)
    least = analysis.total("least", setup.batch, setup.seq).num_bytes
    stages.info("%s is the smallest budget; searching the largest sizes that fit", budget_text(least))
    report = report_of(source, analysis, how, question)
    if question.compares:
        stages.info("recording the same step without memfine_fx")
        report = dataclasses.replace(report, alternatives=_alternatives(source, setup, config, question))
    if report.fits is not False:
        return report
    stages.info("searching changes that would fit")
    changed = Changed(
        analysis,
        functools.partial(_with_optimizer, source, analysis),
        functools.partial(_of_training, source, setup, config, question) if question.compares else None,
    )
    return dataclasses.replace(report, changes=changes(changed, question.available or 0))


def analyse(
    source: object,
    setup: Setup,
    config: Config,
    *,
    has_even_routing: bool = False,
    plans: tuple[str, ...] = PLANS,
    in_parallel: bool = False,
    is_for_own_batch: bool = False,
) -> tuple[Analysis, str]:
    """Return a model's records, and in words what was recorded.

    Args:
        plans: of models that are recorded whole.
        is_for_own_batch: whether the setup's batch alone is asked about; one sequence is then recorded as it is, alone.
    """
    analysis, _ = _analysed(
        source, setup, config, None, has_even_routing, plans, in_parallel=in_parallel, is_for_own_batch=is_for_own_batch
    )
    if len(analysis.records) == 1:
        has_stack = analysis.records[0].is_of_graph
        text = "the graph's operations" if has_stack else "the code that Inductor would write"
        return analysis, f"every layer was analysed, from {text}"
    stack, fewest = analysis.stack, analysis.stack.repeats - analysis.more if analysis.stack else 0
    assert stack is not None
    return analysis, (
        f"{stack.repeats} equal units of {stack.unit} layer(s) were analysed as {fewest} and {fewest + 1}, from the "
        "graph's operations, and counted in full. The smallest budget is that of plans which treat every layer alike; "
        "a real one may do with less"
    )


def analysed_plainly(source: object, setup: Setup, config: Config) -> Analysis:
    """Return the records of the same step as torch.compile compiles it; their plan is "asked"."""
    return _analysed(source, setup, config, (), False)[0]


def _analysed(
    source: object,
    setup: Setup,
    config: Config,
    shares: tuple[float, ...] | None,
    has_even_routing: bool,
    plans: tuple[str, ...] = PLANS,
    *,
    in_parallel: bool = False,
    is_for_own_batch: bool = False,
) -> tuple[Analysis, bool]:
    """Return the records, and whether they are exact for every layer."""
    with contextlib.ExitStack() as processes:
        longer = Request(source, setup, dataclasses.replace(config, memory_budget=None), 1, shares)
        record_of_longer: Callable[[], RecordedStep] = functools.partial(record_shortened, longer)
        if in_parallel and setup.budget is None and can_record_meanwhile(source):
            stages.info("recording a part of the step in a second process")
            record_of_longer = processes.enter_context(recorded_meanwhile(longer))
        mode = new_mode()
        whole = fake_model(source, setup, mode)
        static = _static_bytes(whole, setup)
        stack = find_stack(whole)
        stages.info("model built: %s parameters, %s", f"{static.num_parameters:,}", _repeats_in_words(stack))
        if stack is not None and setup.budget is None:
            shorter = dataclasses.replace(longer, num_more=0)
            pair = record_shortened(shorter, (whole, mode)), record_of_longer()
            short, long = (recorded_step.runs["most" if shares is None else "asked"] for recorded_step in pair)
            is_exact = is_uniform(short, long) and (shares is None or has_all_alike(short, long))
            if is_exact or shares is not None:
                more = stack.repeats - fewest_repeats(stack.unit)
                return Analysis(pair, more, static, setup, shorter.config, has_even_routing, stack), is_exact
    config = dataclasses.replace(config, memory_budget=_budget_of_step(setup, static))
    mode = new_mode()
    # NOTE: the code of many layers takes minutes to write, and that of a plain step calls what no reader of ours knows.
    reads: Reads = "code" if stack is None and shares is None else "graph"
    stages.info("recording a step of all layers, from the %s", "code of Inductor" if reads == "code" else "graph")
    has_own_graph = reads == "code" and setup.batch == 1
    is_alone = has_own_graph and is_for_own_batch
    model = fake_model(source, setup, mode)
    record = record_step(model, setup, mode, config, reads, shares, plans, is_of_one_sequence=is_alone)
    analysis = Analysis((record,), 0, static, setup, config, has_even_routing)
    if is_alone or not has_own_graph:
        return analysis, True
    stages.info("recording the step of one sequence")
    mode = new_mode()
    model = fake_model(source, setup, mode)
    record = record_step(model, setup, mode, config, reads, shares, plans, is_of_one_sequence=True)
    return dataclasses.replace(analysis, of_one_sequence=(record,)), True


def _budget_of_step(setup: Setup, static: StaticBytes) -> MemoryBudget:
    """Return the budget less what the recorded step does not have: fp32 copies of parameters, earlier gradients."""
    budget = parse_budget(setup.budget)
    earlier = static.trained if setup.accumulate > 1 else 0
    return setup.budget if budget is None else max(1, budget - static.optimizer.masters - earlier)


def _repeats_in_words(stack: Stack | None) -> str:
    if stack is None:
        return "no layers that are repeated five times"
    return f"{stack.repeats} equal units of {stack.unit} layer(s)"


def _static_bytes(model: torch.nn.Module, setup: Setup) -> StaticBytes:
    weights, layers = held_tensors(model), [held_tensors(layer) for layer in layer_lists(model)]
    experts = expert_tensors(model)
    return StaticBytes(
        _num_bytes(weights),
        _num_bytes(_trained(weights)),
        _num_bytes(list(model.buffers())),
        optimizer_bytes(model.parameters(), setup),
        layer=max(map(_num_bytes, layers), default=0),
        trained_layer=max((_num_bytes(_trained(layer)) for layer in layers), default=0),
        root=_num_bytes(weights) - sum(map(_num_bytes, layers)),
        experts=_num_bytes(experts),
        trained_experts=_num_bytes(_trained(experts)),
        num_parameters=num_parameters(model),
    )


def _trained(tensors: list[Any]) -> list[Any]:
    return [tensor for tensor in tensors if tensor.requires_grad]


def _num_bytes(tensors: list[Any]) -> int:
    return sum({storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def report_of(source: object, analysis: Analysis, how: str, question: Question) -> FitReport:
    """Return the answer that these records give, without the alternatives that are compared with it."""
    setup, record = analysis.setup, analysis.records[-1]
    batch, seq = setup.batch, setup.seq
    is_extended = len(analysis.records) > 1
    own = analysis.for_batch(batch)
    return FitReport(
        f"{_name(source)} of {analysis.static.num_parameters:,} parameters",
        setup,
        question.memory_bytes,
        own.peak_as_asked(batch, seq) if own.is_asked_known else None,
        own.total("least", batch, seq),
        own.total("most", batch, seq),
        _longest_seq(question, lambda length: own.lightest(batch, length).num_bytes) if own.has_seq else None,
        _longest(question, _MOST_SEQUENCES, lambda num_sequences: analysis.lightest(num_sequences, seq).num_bytes, 1)
        if analysis.has_batch
        else None,
        question.terms,
        record.chunked,
        record.refused,
        "" if is_extended else record.decision,
        how,
        estimates=_estimates(source, setup),
        analysis=analysis,
    )


def _estimates(source: Any, setup: Setup) -> tuple[str, ...]:
    """Return sentences on what the numbers leave out."""
    config = source.get_text_config() if hasattr(source, "get_text_config") else source
    returns_cache = getattr(config, "use_cache", False) and not setup.checkpointing
    sentences = [text for name, text in _ESTIMATES.items() if getattr(setup, name) > 1]
    return (*sentences, *[_WITHOUT_CACHE] * bool(returns_cache))


def _longest_seq(question: Question, needed: Callable[[int], int]) -> int:
    return _longest(question, _MOST_TOKENS, needed, 2)


def _longest(question: Question, most: int, needed: Callable[[int], int], least: int) -> int:
    available = question.available
    if available is None or needed(least) > available:
        return 0
    return largest(least, most + 1, lambda size: needed(size) <= available)


def _alternatives(source: object, setup: Setup, config: Config, question: Question) -> tuple[Alternative, ...]:
    def record(checkpoints: bool) -> tuple[Analysis, bool]:
        plain_setup = dataclasses.replace(setup, checkpointing=checkpoints, budget=None)
        shares = () if checkpoints else SHARES
        return _analysed(source, plain_setup, config, shares, question.has_even_routing)

    return alternatives(record, functools.partial(_longest_seq, question))


def with_setup(source: object, analysis: Analysis, setup: Setup) -> Analysis:
    """Return the same records for a setup that differs in sizes, optimizer or ranks alone."""
    return dataclasses.replace(analysis, setup=setup, static=static_bytes(source, setup))


def static_bytes(source: object, setup: Setup) -> StaticBytes:
    """Return the bytes that are allocated throughout every step; nothing is recorded."""
    return _static_bytes(fake_model(source, setup, new_mode()), setup)


def _with_optimizer(source: object, analysis: Analysis, name: Any) -> Analysis:
    """Return the same step with another optimizer, which changes nothing within forward and backward."""
    return with_setup(source, analysis, dataclasses.replace(analysis.setup, optimizer=name))


def _of_training(source: object, setup: Setup, config: Config, question: Question, train: Train) -> Analysis:
    adapter_setup = dataclasses.replace(setup, train=train, budget=None)
    return _analysed(source, adapter_setup, config, None, question.has_even_routing)[0]


def _name(source: Any) -> str:
    return str(getattr(source, "model_type", "") or getattr(source, "__name__", "") or type(source).__name__)
