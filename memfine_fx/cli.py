"""`memfine demo | explain | fit | verify | plan | bench`; what a command needs is imported when it runs, torch too."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfine_fx import __version__
from memfine_fx.config import Config, budget_as_written
from memfine_fx.errors import ConfigError, MemfineError
from memfine_fx.flags import PLANNERS, as_typed, parser_of
from memfine_fx.progress import shown_stages, silenced_packages, stages, unspoken
from memfine_fx.units import bytes_of_text, readable_bytes

if TYPE_CHECKING:
    import torch

    from memfine_fx.fitting.report import FitReport
    from memfine_fx.plan.front import FrontPoint
    from memfine_fx.plan.layer import RowsPoint
    from memfine_fx.records import ChunkPlan

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status. Errors of ours are one line on stderr, status 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["bench"]:
        return _bench(arguments[1:])
    if arguments[:1] == ["plan"] and arguments[1:2] and arguments[1] in PLANNERS:
        return _run_planner(arguments[1:])
    commands = {"demo": _demo, "explain": _explain, "fit": _fit, "verify": _verify, "plan": _plan}
    if _is_checkout():
        commands["bench"] = lambda options: _bench([])
    options = parser_of(commands, __version__).parse_args(arguments)
    try:
        return int(options.run(options))
    except MemfineError as error:
        print(f"memfine: {as_typed(str(error), options)}", file=sys.stderr)
        return 2


@contextlib.contextmanager
def _shown(options: argparse.Namespace, *, loads: str) -> Iterator[None]:
    """Show the stages of a command unless it is quiet, and hide what other packages write.

    Args:
        loads: the stage in which torch is loaded.
    """
    with contextlib.ExitStack() as stack:
        is_silent = options.quiet or getattr(options, "json", False)
        stack.enter_context(unspoken() if is_silent else shown_stages())
        stages.info("%s", loads)
        stack.enter_context(silenced_packages())
        yield


def _check_bytes(option: str, text: str | None, *words: str) -> None:
    """Raise a ConfigError that names the option where its text is neither None, nor bytes, nor one of the words."""
    if text is None or text in words or bytes_of_text(text) > 0:
        return
    raise ConfigError(f"{option} {text!r} is not understood; expected bytes, such as 80GiB, 24GB or 85899345920")


def _fit(options: argparse.Namespace) -> int:
    """Status 0 where it fits or no memory was given, 1 where it does not."""
    _check_bytes("--memory", options.memory)
    _check_bytes("--budget", options.budget, "least")
    with _shown(options, loads=f"{options.model}: loading torch and transformers"):
        report = _fit_report(options)
    if options.html:
        report.to_html(options.html)
    print(report.to_json() if options.json else report)
    return 1 if report.fits is False else 0


def _fit_report(options: argparse.Namespace) -> FitReport:
    from memfine_fx.fitting.answer import Question, answer
    from memfine_fx.fitting.setup import Setup
    from memfine_fx.fitting.shortened import few_collections
    from memfine_fx.fitting.stored import answer_or_stored

    setup = Setup(
        options.batch,
        options.seq,
        options.train,
        options.lora_r,
        (*options.targets, *options.target_parameters),
        options.dtype,
        options.optimizer,
        options.master_weights,
        options.checkpointing,
        options.budget,
        options.fsdp,
        options.expert_parallel,
        options.device,
        options.accumulate,
    )
    question = Question(options.memory, options.gpu, options.device, options.even_routing, options.alternatives)
    path, _, name = options.model.rpartition(":")
    with few_collections():
        if path.endswith(".py") and Path(path).exists():
            return answer(_factory(path, name), setup, question, Config.from_environment())
        is_new = options.no_cache or options.html is not None
        return answer_or_stored(options.model, setup, question, Config.from_environment(), is_new=is_new)


def _config(options: argparse.Namespace) -> Config:
    """Return the config of --config, else of MEMFINE_OPTIONS; --budget overrides its budget."""
    fields: dict[str, Any] = {}
    if options.config:
        try:
            fields = json.loads(Path(options.config).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--config {options.config}: {error}") from error
        if not isinstance(fields, dict):
            raise ConfigError(f"--config {options.config} must hold an object of fields, got {type(fields).__name__}")
        if isinstance(fields.get("bins"), list):
            fields["bins"] = tuple(fields["bins"])
        fields.setdefault("config", Config())
    if options.budget:
        is_fraction = isinstance(budget_as_written(options.budget), float)
        _check_bytes("--budget", None if is_fraction else options.budget, "least")
        fields["memory_budget"] = budget_as_written(options.budget)
    try:
        return Config.from_options(fields)
    except ConfigError as error:
        if not options.config:
            raise
        raise ConfigError(f"--config {options.config}: {str(error).replace('Config.', '')}") from error


def _demo(options: argparse.Namespace) -> int:
    with _shown(options, loads="loading torch and transformers"):
        from memfine_fx.demo.runner import run_demo

        return run_demo(steps=options.steps, layers=options.layers, out=options.out, quick=options.quick)


def _explain(options: argparse.Namespace) -> int:
    config = _config(options)
    with _shown(options, loads=f"{options.target}: loading torch and transformers"):
        from memfine_fx.api import explain

        model, args, kwargs = _load(options.target, options.experts)
        is_measured = options.measure or options.plot is not None
        report = explain(model, *args, measure=is_measured, config=config, **kwargs)
    if options.plot is not None:
        report.plot(options.plot)
    print(report.to_json() if options.json else report)
    if options.picture:
        Path(options.picture).write_text(report.picture(options.region), encoding="utf-8")
    return 0


def _verify(options: argparse.Namespace) -> int:
    """Status 1 if a rewrite differs from what it replaces."""
    config = _config(options)
    with _shown(options, loads=f"{options.target}: loading torch and transformers"):
        from memfine_fx.api import verify

        model, args, kwargs = _load(options.target, options.experts)
        verify_report = verify(model, *args, config=config, **kwargs)
    print(verify_report.to_json() if options.json else verify_report)
    return 0 if verify_report.has_passed else 1


def _plan(options: argparse.Namespace) -> int:
    if options.paper:
        from memfine_fx.memory.published import render

        print(render())
        return 0
    _check_bytes("--budget", options.budget, "least")
    with _shown(options, loads="loading torch"):
        import torch

        from memfine_fx.compiler.swiglu import layer_bytes, layer_work
        from memfine_fx.plan.front import layer_front, read_measured
        from memfine_fx.plan.layer import LayerSizes, plan_layer, sweep_rows
        from memfine_fx.report.chart import write_charts
        from memfine_fx.report.figure import front_chart

        stages.info("planning one layer: its forward and backward are traced")
        sizes = LayerSizes(
            num_tokens=options.tokens,
            hidden=options.hidden,
            expert_width=options.width,
            num_experts=options.experts,
            top_k=options.top_k,
            dtype=getattr(torch, options.dtype),
            device=options.device,
        )
        region = layer_bytes(sizes)
        plan, terms = plan_layer(
            sizes, region, memory_budget=options.budget, axis=options.axis, rows_per_chunk=options.rows
        )
        points = sweep_rows(sizes, region) if options.sweep else []
        if options.front or options.plot:
            stages.info("comparing plans in bytes and time")
        front = layer_front(sizes, layer_work) if options.front or options.plot else []
        if options.plot:
            chart = front_chart(front, read_measured(options.measured) if options.measured else [])
            write_charts(options.plot, [[("Time against memory of one layer", chart)]], width=800)
    if options.json:
        shown = {"plan": asdict(plan), "terms": terms, "sweep": [asdict(point) for point in points]}
        shown["front"] = [asdict(point) for point in front]
        print(json.dumps(shown, indent=2))
    else:
        _print_plan(plan, terms, points, front)
    return 0


def _print_plan(
    plan: ChunkPlan, terms: Mapping[str, int], points: Sequence[RowsPoint], front: Sequence[FrontPoint]
) -> None:
    size = f"{plan.rows_per_chunk} rows" if plan.axis == "rows" else f"{plan.tokens_per_chunk} tokens"
    print(f"axis {plan.axis}, {size} a chunk: {plan.reason}")
    print(f"predicted peak of the layer beyond parameters: {readable_bytes(plan.predicted_bytes)}")
    for name, num_bytes in sorted(terms.items(), key=lambda term: -term[1]):
        print(f"  {name:22} {readable_bytes(num_bytes):>10}")
    if points:
        print(f"{'rows a chunk':>12}{'peak':>12}{'chunks, balanced':>18}{'chunks, skewed':>16}")
    for point in points:
        peak = readable_bytes(point.peak_bytes)
        print(f"{point.rows:12,}{peak:>12}{point.chunks_balanced:18,}{point.chunks_skewed:16,}")
    if front:
        print(f"{'rows a chunk':>12}  {'saves':12}{'peak beyond gradients':>22}{'predicted s':>13}")
    for front_point in front:
        peak = readable_bytes(front_point.peak_bytes)
        print(f"{front_point.rows:12,}  {front_point.policy:12}{peak:>22}{front_point.seconds:13.3f}")


def _run_planner(arguments: list[str]) -> int:
    """Run `memfine plan ARGUMENTS`, whose first is the name of an entry point of the group "memfine_fx.planners"."""
    planners = entry_points(group="memfine_fx.planners", name=arguments[0])
    if not planners:
        package = "the package memfine-planner (in a checkout: pip install ./planner)"
        print(f"memfine: plan {arguments[0]} needs {package}", file=sys.stderr)
        return 2
    try:
        command = next(iter(planners)).load()
        parser = argparse.ArgumentParser(prog="memfine plan")
        command.add_parser(parser.add_subparsers(required=True, metavar="PLANNER"))
        options = parser.parse_args(arguments)
        with contextlib.nullcontext() if options.quiet or options.json else shown_stages():
            return int(command.run(options))
    except MemfineError as error:
        print(f"memfine: {error}", file=sys.stderr)
        return 2


def _is_checkout() -> bool:
    return Path("benchmarks/__main__.py").exists() and Path("pyproject.toml").exists()


def _bench(arguments: list[str]) -> int:
    if not _is_checkout():
        print("memfine: bench runs from a source checkout: cd to it, then `memfine bench ...`", file=sys.stderr)
        return 2
    sys.path.insert(0, "")
    from runpy import run_module

    sys.argv = ["benchmarks", "run", *arguments]
    try:
        run_module("benchmarks", run_name="__main__", alter_sys=True)
    except SystemExit as status:
        return int(status.code or 0)
    return 0


def _load(target: str, experts: str | None) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A model and one call's inputs, from hf:MODEL_TYPE or file.py:factory.

    A factory returns a module, (module, inputs) with inputs a tensor, a tuple or a dict, or (module, *tensors).
    """
    import torch

    kind, _, name = target.partition(":")
    if kind == "hf" and name:
        from memfine_fx.demo.tiny import tiny_model

        try:
            tiny = tiny_model(name, experts_implementation=experts)
        except ConfigError:  # a dense model has its explanation too
            tiny = tiny_model(name, experts_implementation=experts, wants_experts=False)
        return tiny.module, (), tiny.inputs
    path, _, factory_name = target.rpartition(":")
    if not path.endswith(".py") or not Path(path).exists():
        raise ConfigError(
            f"{target!r} is neither hf:MODEL_TYPE nor an existing path/to/file.py:factory; `memfine fit` takes configs"
        )
    returned = _factory(path, factory_name)()
    model, *more = returned if isinstance(returned, tuple) else (returned,)
    inputs = more[0] if len(more) == 1 else tuple(more)
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"{target} returned {type(model).__name__}; expected a module or (module, inputs)")
    if isinstance(inputs, dict):
        return model, (), inputs
    if isinstance(inputs, torch.Tensor):
        return model, (inputs,), {}
    if not isinstance(inputs, (tuple, list)):
        raise ConfigError(f"{target} returned {type(inputs).__name__} as inputs; expected a tensor, a tuple or a dict")
    return model, tuple(inputs), {}


def _factory(path: str, name: str) -> Callable[[], Any]:
    spec = importlib.util.spec_from_file_location("memfine_explained", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    factory = getattr(module, name, None)
    if not callable(factory):
        raise ConfigError(f"{path} has no callable {name!r}")
    return factory  # type: ignore[no-any-return]  # the user's code is untyped


if __name__ == "__main__":
    sys.exit(main())
