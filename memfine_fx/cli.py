"""`memfine demo | explain | fit | verify | plan | bench`; what a command needs is imported when it runs, torch too."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfine_fx import __version__

if TYPE_CHECKING:
    import torch

    from memfine_fx.config import Config
    from memfine_fx.fitting.report import FitReport

__all__ = ["main"]

_PLANNERS = {
    "training": "which strategy trains a model fastest on a cluster",
    "serving": "which devices prefill, which decode, and how many",
    "split": "where to cut a model between devices and a server",
}
"""Planners of the package memfine-planner, and what each answers."""
_DTYPES = ("bfloat16", "float16", "float32")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status. Errors of ours are one line on stderr, status 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["bench"]:
        return _bench(arguments[1:])
    if arguments[:1] == ["plan"] and arguments[1:2] and arguments[1] in _PLANNERS:
        return _run_planner(arguments[1:])
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except Exception as error:
        from memfine_fx.errors import MemfineError  # loads torch, which the first line of `fit` does not wait for

        if not isinstance(error, MemfineError):
            raise
        print(f"memfine: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="memfine", description="Chunked, recomputing MoE training for PyTorch.")
    parser.add_argument("--version", action="version", version=f"memfine {__version__}")
    names = "demo | explain | fit | verify | plan" + (" | bench" if _is_checkout() else "")
    commands = parser.add_subparsers(required=True, metavar=names)

    demo = commands.add_parser("demo", help="train a small Qwen3-MoE three ways and compare memory, time and loss")
    demo.add_argument("--steps", type=int, default=8)
    demo.add_argument("--layers", type=int, default=4)
    demo.add_argument("--out", default=".", help="folder for the chart and the JSON")
    demo.add_argument("--quick", action="store_true", help="a smaller model")
    demo.set_defaults(run=_demo)

    shown = commands.add_parser("explain", help="what is found, chosen or refused in a model, and why")
    shown.add_argument("target", help="hf:MODEL_TYPE (toy size) or path/to/file.py:factory")
    shown.add_argument("--experts", help="transformers' experts implementation; its own default without")
    shown.add_argument("--json", action="store_true")
    shown.add_argument("--picture", metavar="FILE.svg", help="draw the graph of one chunked region")
    shown.add_argument("--region", type=int, default=0, help="which chunked region to draw")
    shown.add_argument("--measure", action="store_true", help="also run a step and measure its peak")
    shown.add_argument("--plot", metavar="FILE", help="draw the measured step's memory (png, svg, pdf); measures")
    _add_config(shown)
    shown.set_defaults(run=_explain)

    _add_fit(commands)

    verified = commands.add_parser("verify", help="hold every rewrite of a model against what it replaces, in fp64")
    verified.add_argument("target", help="hf:MODEL_TYPE (toy size) or path/to/file.py:factory")
    verified.add_argument("--experts", help="transformers' experts implementation; its own default without")
    verified.add_argument("--json", action="store_true")
    _add_config(verified)
    verified.set_defaults(run=_verify)

    plan = commands.add_parser(
        "plan",
        help=f"rows per chunk and bytes of one SwiGLU MoE layer; or plan {' | '.join(_PLANNERS)}",
        epilog="Planners of their own, with --help each: "
        + "; ".join(f"memfine plan {name}: {answer}" for name, answer in _PLANNERS.items()),
    )
    for name, default in (("tokens", 8192), ("hidden", 2048), ("width", 768), ("experts", 128), ("top-k", 8)):
        plan.add_argument(f"--{name}", type=int, default=default)
    plan.add_argument("--dtype", choices=_DTYPES, default="bfloat16")
    plan.add_argument("--budget", help="bytes the layer may use beyond parameters, e.g. 800MB")
    plan.add_argument("--axis", choices=("rows", "tokens"), default="rows")
    plan.add_argument("--rows", type=int, help="rows per chunk at most, instead of the planner's choice")
    plan.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the layer would run")
    plan.add_argument("--sweep", action="store_true", help="also predicted bytes and chunks for other rows per chunk")
    plan.add_argument("--front", action="store_true", help="the plans that none beats in both bytes and time")
    plan.add_argument("--plot", metavar="FILE", help="draw that front (png, svg, pdf)")
    plan.add_argument("--measured", metavar="ROWS.jsonl", help="with --plot: peers' points of a benchmark's rows")
    plan.add_argument("--json", action="store_true")
    plan.add_argument("--paper", action="store_true", help="MemFine's table and map of chunks by its closed form")
    plan.set_defaults(run=_plan)

    if _is_checkout():
        commands.add_parser("bench", help="the benchmark harness of this checkout; see memfine bench --help")
    return parser


def _add_fit(commands: Any) -> None:
    fitted = commands.add_parser(
        "fit",
        help="whether a model trains within so many bytes, from its config alone",
        formatter_class=_DefaultsShown,
        epilog="Progress goes to stderr, the answer to stdout. Status 1: it does not fit the memory.",
    )
    fitted.add_argument(
        "model", help="a folder, a config.json, a model type, a hub name, or path/to/file.py:factory of a module"
    )
    fitted.add_argument("--memory", metavar="BYTES", help="memory of the device, e.g. 80GiB")
    fitted.add_argument("--gpu", help="the device by its name, e.g. h100, rtx-4090, mi300x")
    fitted.add_argument(
        "--batch", "--per-device-train-batch-size", type=_positive, default=1, metavar="N", help="sequences in a step"
    )
    fitted.add_argument(
        "--seq", "--max-length", type=_positive, default=4096, metavar="TOKENS", help="tokens of each sequence"
    )
    fitted.add_argument(
        "--accumulate",
        "--gradient-accumulation-steps",
        type=_positive,
        default=1,
        metavar="N",
        help="micro-batches whose gradients are added before the optimizer steps",
    )
    fitted.add_argument("--train", choices=("full", "lora", "qlora"), default="full", help="what is trained")
    fitted.add_argument("--lora-r", type=_positive, default=16, metavar="RANK", help="rank of the adapters")
    fitted.add_argument(
        "--targets",
        "--lora-target-modules",
        nargs="+",
        default=(),
        metavar="NAME",
        help="linear layers with adapters, or expert weights such as mlp.experts.gate_up_proj; without, all linear "
        "layers but the head",
    )
    fitted.add_argument(
        "--lora-target-parameters",
        dest="target_parameters",
        nargs="+",
        default=(),
        metavar="NAME",
        help="more of them, by PEFT's name for expert weights",
    )
    fitted.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="bf16", help="of parameters")
    fitted.add_argument(
        "--optimizer",
        "--optim",
        choices=("adamw", "adamw8bit", "sgd", "adafactor"),
        default="adamw",
        help="of torch; adamw8bit of bitsandbytes",
    )
    fitted.add_argument("--master-weights", action="store_true", help="fp32 copies that the optimizer works on")
    fitted.add_argument(
        "--checkpointing", "--gradient-checkpointing", action="store_true", help="checkpoint every layer of the model"
    )
    fitted.add_argument(
        "--budget", metavar="BYTES", help="memory_budget that optimize would be given, e.g. 60GiB, or least"
    )
    fitted.add_argument(
        "--fsdp", type=_positive, default=1, metavar="N", help="ranks that share parameters; bytes of one, an estimate"
    )
    fitted.add_argument(
        "--expert-parallel", type=_positive, default=1, metavar="N", help="ranks that share experts; an estimate"
    )
    fitted.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="where it would train")
    fitted.add_argument("--even-routing", action="store_true", help="experts get equal numbers of rows")
    fitted.add_argument(
        "--alternatives",
        action="store_true",
        help="also plain training, checkpointing, torch.compile's ratio, and LoRA",
    )
    fitted.add_argument("--html", metavar="FILE", help="one file with a chart and sliders for sizes and memory")
    fitted.add_argument("--json", action="store_true", help="the answer as JSON, without progress")
    fitted.add_argument("--no-cache", action="store_true", help="do not show the stored answer of an earlier run")
    fitted.add_argument("-q", "--quiet", action="store_true", help="no progress")
    fitted.set_defaults(run=_fit)


class _DefaultsShown(argparse.HelpFormatter):
    """A formatter that adds the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = action.default not in (None, False, (), argparse.SUPPRESS)
        return f"{action.help} (default: %(default)s)" if has_default else action.help


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be a positive int")
    return int(text)


def _check_bytes(option: str, text: str | None, *words: str) -> None:
    """Raise a ConfigError that names the option where its text is neither None, nor bytes, nor one of the words."""
    from memfine_fx.config import parse_budget
    from memfine_fx.errors import ConfigError

    if text is None or text in words:
        return
    with contextlib.suppress(ConfigError):
        if parse_budget(text) is not None:
            return
    raise ConfigError(f"{option} {text!r} is not understood; expected bytes, such as 80GiB, 24GB or 85899345920")


def _fit(options: argparse.Namespace) -> int:
    """Status 0 where it fits or no memory was given, 1 where it does not."""
    from memfine_fx.fitting.progress import shown_stages, silenced_packages, stages

    with contextlib.ExitStack() as stack:
        if not (options.quiet or options.json):
            stack.enter_context(shown_stages())
        stages.info("%s: loading torch and transformers", options.model)
        stack.enter_context(silenced_packages())
        report = _fit_report(options)
    if options.html:
        report.to_html(options.html)
    print(report.to_json() if options.json else report)
    return 1 if report.fits is False else 0


def _fit_report(options: argparse.Namespace) -> FitReport:
    _check_bytes("--memory", options.memory)
    _check_bytes("--budget", options.budget, "least")
    from memfine_fx.config import Config
    from memfine_fx.fitting.answer import Question, answer
    from memfine_fx.fitting.setup import Setup
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
    if path.endswith(".py") and Path(path).exists():
        return answer(_factory(path, name), setup, question, Config.from_environment())
    is_new = options.no_cache or options.html is not None
    return answer_or_stored(options.model, setup, question, Config.from_environment(), is_new=is_new)


def _add_config(command: argparse.ArgumentParser) -> None:
    command.add_argument("--budget", help="peak bytes of a step: 20GiB, a number of bytes, or 0.8 of the device")
    command.add_argument("--config", metavar="FILE.json", help="fields of memfine_fx.Config; else MEMFINE_OPTIONS")


def _config(options: argparse.Namespace) -> Config:
    """Return the config of --config, else of MEMFINE_OPTIONS; --budget overrides its budget."""
    from memfine_fx.config import Config, budget_as_written
    from memfine_fx.errors import ConfigError

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
        fields["memory_budget"] = budget_as_written(options.budget)
    return Config.from_options(fields)


def _demo(options: argparse.Namespace) -> int:
    from memfine_fx.demo.runner import run_demo

    return run_demo(steps=options.steps, layers=options.layers, out=options.out, quick=options.quick)


def _explain(options: argparse.Namespace) -> int:
    from memfine_fx.api import explain

    config = _config(options)
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
    from memfine_fx.api import verify

    config = _config(options)
    model, args, kwargs = _load(options.target, options.experts)
    verify_report = verify(model, *args, config=config, **kwargs)
    print(verify_report.to_json() if options.json else verify_report)
    return 0 if verify_report.has_passed else 1


def _plan(options: argparse.Namespace) -> int:
    if options.paper:
        from memfine_fx.memory.published import render

        print(render())
        return 0
    import torch

    from memfine_fx.compiler.swiglu import layer_bytes, layer_work
    from memfine_fx.plan.front import layer_front, read_measured
    from memfine_fx.plan.layer import LayerSizes, plan_layer, sweep_rows
    from memfine_fx.report.figure import draw_front
    from memfine_fx.units import readable_bytes

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
    front = layer_front(sizes, layer_work) if options.front or options.plot else []
    if options.plot:
        draw_front(front, read_measured(options.measured) if options.measured else [], options.plot)
    if options.json:
        shown = {"plan": asdict(plan), "terms": terms, "sweep": [asdict(point) for point in points]}
        shown["front"] = [asdict(point) for point in front]
        print(json.dumps(shown, indent=2))
        return 0
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
    return 0


def _run_planner(arguments: list[str]) -> int:
    """Run `memfine plan ARGUMENTS`, whose first is the name of an entry point of the group "memfine_fx.planners"."""
    from memfine_fx.errors import MemfineError

    planners = entry_points(group="memfine_fx.planners", name=arguments[0])
    if not planners:
        print(f"memfine: plan {arguments[0]} needs pip install memfine-planner", file=sys.stderr)
        return 2
    try:
        command = next(iter(planners)).load()
        parser = argparse.ArgumentParser(prog="memfine plan")
        command.add_parser(parser.add_subparsers(required=True, metavar="PLANNER"))
        return int(command.run(parser.parse_args(arguments)))
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

    from memfine_fx.errors import ConfigError

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
        raise ConfigError(f"{target!r} is neither hf:MODEL_TYPE nor an existing path/to/file.py:factory")
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
    from memfine_fx.errors import ConfigError

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
