"""`memfine plan training`: search for a strategy, or evaluate the one that the flags fix."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from memfine_fx.errors import ConfigError
from memfine_fx.flags import add_flag, add_output
from memfine_fx.progress import stages, under_way
from memfine_planner.costs.architectures import Architecture
from memfine_planner.costs.model_configs import architecture
from memfine_planner.costs.strategy import PRECISIONS, Strategy, StrategyError, check, with_fields
from memfine_planner.hardware.systems import System, builtin_systems, system
from memfine_planner.training.faults import FaultModel, checkpoint_cost, fewest_spares
from memfine_planner.training.figures import write_figures
from memfine_planner.training.history import published_histories, read_history
from memfine_planner.training.html import write_html
from memfine_planner.training.nearest import check_memory
from memfine_planner.training.plan import make_plan
from memfine_planner.training.reliability import Reliability, assess, fault_model
from memfine_planner.training.reliability_report import reliability_text
from memfine_planner.training.report import cost_text, front_table, plan_json, plan_text
from memfine_planner.training.routing import ROUTINGS, Routing
from memfine_planner.training.runs import load_runs, preset
from memfine_planner.training.sweep import FACTORS, Study, parse_factor, study
from memfine_planner.training.sweep_report import study_text
from memfine_planner.training.tuner import Request, Tuned, tune
from memfine_planner.training.validation import check_runs, runs_table

__all__ = ["add_parser", "run"]

_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_FIXED = {
    "tp": ("tensor parallel size", 8),
    "pp": ("pipeline parallel size", 4),
    "vp": ("interleaved chunks of a pipeline rank", 2),
    "cp": ("context parallel size", 2),
    "ep": ("expert parallel size", 8),
    "zero": ("what data parallel ranks shard: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too", 3),
    "micro_batch": ("sequences of a micro-batch", 2),
    "chunks": ("token chunks of the experts", 4),
    "rows_per_round": ("the most rows that a rank receives at once; 0 for no bound", 65536),
    "offload_layers": ("layers whose saved activations go to host memory", 4),
}
"""Fields of a strategy with a flag each: what they mean, and an example."""


def run(options: argparse.Namespace) -> int:
    """Run the command; errors of ours are raised for the caller to print."""
    reliability = _reliability(options)
    if reliability and not options.model:
        print(reliability_text(reliability))
        return 0
    if options.runs:
        print(runs_table(check_runs(load_runs(options.runs))))
        return 0
    if not options.model or options.gpus is None:
        raise ConfigError("plan training needs --model and --gpus (or --runs FILE)")
    request = _request(options, reliability)
    tuned, strategy = _strategy(options, request)
    plan = make_plan(request, strategy, options.tokens * 1e12, tuned)
    front = tuned.front if tuned else ()
    factors = [parse_factor(text) for text in options.sweep]
    swept = _sweep(request, strategy, factors) if factors else None
    if options.html:
        write_html(plan, options.html, front, swept)
        print(f"wrote {options.html}", file=sys.stderr)
    if options.figures:
        for path in write_figures(plan, options.figures, front, swept):
            print(f"wrote {path}", file=sys.stderr)
    if options.json:
        print(plan_json(plan, front, swept))
    elif options.cost != "faults":
        print(cost_text(plan, options.cost, layers=options.layers))
    else:
        if front:
            print(front_table(front), end="\n\n")
        print(plan_text(plan, layers=options.layers))
        if swept:
            print("\n" + study_text(swept))
    if tuned is None:
        check_memory(request, strategy)
    return 0


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the command's parser to those of `memfine plan`."""
    parser = commands.add_parser(
        "training",
        description="Which parallel strategy, chunking and recomputation trains a model fastest without running out of "
        "memory on a bad iteration, how fast, and how much of it survives failures. Free sizes are searched; fixing "
        "--tp, --pp and (MoE) --ep evaluates that strategy alone.",
    )
    add_flag(
        parser, "--model", help="built-in name, transformers model type or config .json", example="llama3_8b",
        without="needed, but with --runs or --history",
    )  # fmt: skip
    add_flag(parser, "--gpus", type=int, help="GPUs of the cluster", example="1024", without="needed with --model")
    add_flag(
        parser,
        "--system",
        default="H100",
        help=f"{', '.join(builtin_systems())}, or a .yaml/.json file",
        example="H200",
    )
    add_flag(parser, "--seq", type=int, default=4096, help="tokens per sequence", example="8192")
    add_flag(parser, "--global-batch", type=int, help="sequences per step", example="2048", without="8 per GPU")
    add_flag(
        parser, "--precision", default="BF16", choices=sorted(PRECISIONS), help="of the matrix products", example="FP8"
    )
    for name, (meaning, example) in _FIXED.items():
        flag = f"--{name.replace('_', '-')}"
        add_flag(parser, flag, type=int, help=meaning, example=str(example), without="searched")
    add_flag(
        parser, "--recompute", choices=("none", "selective", "full", "experts"), help="what backward computes again",
        example="experts", without="searched",
    )  # fmt: skip
    add_flag(
        parser, "--routing", choices=ROUTINGS, default="table", help="of a MoE model; table is the paper's",
        example=ROUTINGS[-1],
    )  # fmt: skip
    add_flag(parser, "--zipf-alpha", type=float, default=0.8, help="how uneven the routing zipf is", example="1.2")
    add_flag(parser, "--bad-share", type=float, default=0.16, help="bad iterations of the table routing", example="0.3")
    add_flag(
        parser, "--percentile", type=float, default=99.9, help="of iterations that must fit in memory", example="99"
    )
    add_flag(parser, "--tokens", type=float, default=15.0, help="trillions of tokens to train on", example="2.5")
    add_flag(
        parser, "--set", action="append", default=[], metavar="FIELD=VALUE", example="overlap_tp=false",
        help=f"any other field of the strategy: {', '.join(_settable())}", without="the strategy's own defaults",
    )  # fmt: skip
    add_flag(
        parser, "--runs", type=Path, metavar="FILE", help="predict the published runs of this file instead",
        example="runs.json", without="plan for --model",
    )  # fmt: skip
    _add_failures(parser)
    _add_output(parser)
    return parser


def _add_failures(parser: argparse.ArgumentParser) -> None:
    add_flag(
        parser,
        "--failure-rate",
        type=float,
        help="per GPU and hour",
        example="2e-5",
        without="that of arXiv 2407.21783",
    )
    add_flag(
        parser, "--restart", type=float, help="s until the job is back", example="600",
        without="420, or the history's",
    )  # fmt: skip
    add_flag(
        parser, "--detection", type=float, help="s until a failure is noticed", example="60",
        without="120, or the history's",
    )  # fmt: skip
    add_flag(
        parser, "--spares", type=int, help="spare nodes", example="8",
        without="2% of the nodes, or what the history asks",
    )  # fmt: skip
    add_flag(
        parser, "--history", metavar="FILE", example="interruptions.csv", without="none",
        help="a log of interruptions (.csv or .json: time, node, component, downtime, cause) that the failures are "
        f"read from, or a published one: {', '.join(published_histories())}; alone, it is only assessed",
    )  # fmt: skip
    add_flag(
        parser, "--history-nodes", type=int, help="nodes of the logged cluster, failed or not", example="512",
        without="the log's",
    )  # fmt: skip
    add_flag(parser, "--history-days", type=float, help="days that the log observed", example="54", without="the log's")
    add_flag(
        parser, "--checkpoint", choices=("asynchronous", "blocking"), default="asynchronous",
        help="how checkpoints are written", example="blocking",
    )  # fmt: skip


def _add_output(parser: argparse.ArgumentParser) -> None:
    add_flag(
        parser, "--sweep", nargs="+", default=[], metavar="FACTOR=VALUES", without="no sweep",
        example="gpus=64:16384 seq=4096:65536:5 ep=1,8,64",
        help=f"what matters: tables and figures over factors, one at a time; factors: {', '.join(FACTORS)}",
    )  # fmt: skip
    add_flag(
        parser, "--cost", choices=("base", "optimised", "faults"), default="faults", example="base",
        help="the cost model's layer to print: every term alone; with overlap and host; with failures and all else",
    )  # fmt: skip
    add_flag(parser, "--layers", action="store_true", help="print every term of every kind of layer")
    add_output(parser)
    add_flag(
        parser, "--html", type=Path, metavar="FILE", help="write the report with figures", example="plan.html",
        without="no page",
    )  # fmt: skip
    add_flag(
        parser, "--figures", type=Path, metavar="FOLDER", help="write the figures as SVG files", example="figures",
        without="no figures",
    )  # fmt: skip


def _request(options: argparse.Namespace, reliability: Reliability | None) -> Request:
    fixed: dict[str, Any] = {name: getattr(options, name) for name in _FIXED if getattr(options, name) is not None}
    if options.recompute:
        fixed["recompute"] = options.recompute
    fixed |= dict(_setting(text) for text in options.set)
    arch, sys_ = architecture(options.model), system(options.system)
    if not 0 < options.percentile <= 100:
        raise ConfigError(f"--percentile {options.percentile} must be in (0, 100]")
    if options.tokens <= 0:
        raise ConfigError(f"--tokens {options.tokens} must be positive")
    return Request(
        arch,
        sys_,
        options.gpus,
        8 * options.gpus if options.global_batch is None else options.global_batch,
        options.seq,
        options.precision,
        Routing(options.routing if arch.is_moe else "balanced", options.zipf_alpha, options.bad_share),
        _faults(options, arch, sys_, reliability),
        tuple(fixed.items()),
        options.percentile,
        options.checkpoint == "asynchronous",
        reliability,
    )


def _reliability(options: argparse.Namespace) -> Reliability | None:
    if options.history is None:
        if options.history_nodes or options.history_days:
            raise ConfigError("--history-nodes and --history-days belong to --history FILE")
        return None
    if options.failure_rate is not None:
        raise ConfigError("--history and --failure-rate both give the rate of failures; give one")
    return assess(read_history(options.history, nodes=options.history_nodes, days=options.history_days))


def _faults(
    options: argparse.Namespace, arch: Architecture, sys_: System, reliability: Reliability | None
) -> FaultModel:
    """Flags before the history, the history before the defaults; spares by the history are the fewest that suffice."""
    model = FaultModel() if reliability is None else fault_model(reliability, FaultModel())
    given = {"rate_per_gpu_hour": options.failure_rate, "detection": options.detection, "restart": options.restart}
    model = replace(model, **{name: value for name, value in given.items() if value is not None})
    if options.spares is not None:
        return replace(model, spares=options.spares)
    if reliability is None or options.gpus < 1:
        return replace(model, spares=max(0, math.ceil(0.02 * options.gpus / 8)))
    plain = Strategy(gpus=options.gpus)
    cost = checkpoint_cost(arch.params, plain, sys_, asynchronous=options.checkpoint == "asynchronous")
    return replace(model, spares=fewest_spares(cost, model, options.gpus))


def _settable() -> tuple[str, ...]:
    """Strategy fields without a flag of their own."""
    named = {*_FIXED, "gpus", "global_batch", "seq", "precision", "recompute"}
    return tuple(field.name for field in fields(Strategy) if field.name not in named)


def _setting(text: str) -> tuple[str, Any]:
    """A "field=value" of --set, the value read as the field's type."""
    name, _, value = text.partition("=")
    if name not in _settable():
        raise ConfigError(f"--set {text}: unknown field {name!r}; known: {', '.join(_settable())}")
    kind = type(getattr(Strategy(gpus=1), name))
    if kind is bool:
        if value.lower() not in _BOOLEANS:
            raise ConfigError(f"--set {text}: {name} is true or false")
        return name, _BOOLEANS[value.lower()]
    if kind is str:
        return name, value
    try:
        return name, int(value)
    except ValueError:
        raise ConfigError(f"--set {text}: {name} is an integer") from None


def _strategy(options: argparse.Namespace, request: Request) -> tuple[Tuned | None, Strategy]:
    fixed = dict(request.fixed)
    needed = {"tp", "pp", *(["ep"] if request.arch.is_moe else [])}
    if needed <= set(fixed):
        strategy = with_fields(
            Strategy(request.gpus, global_batch=request.global_batch, seq=request.seq, precision=request.precision),
            **(preset(request.arch, request.system, fixed.get("vp", 1), fixed.get("recompute", "none")) | fixed),
        )
        check(request.arch, request.system, strategy)
        return None, strategy
    # Sizes that can never be right get their rule named before the search finds nothing.
    base = Strategy(request.gpus, global_batch=request.gpus * 64, seq=request.seq, precision=request.precision)
    alone = {k: v for k, v in fixed.items() if k not in ("ep", "vp", "chunks", "rows_per_round")}
    check(request.arch, request.system, with_fields(base, **alone | {"micro_batch": 1}))
    if request.global_batch < 1:
        raise StrategyError(f"global_batch={request.global_batch} must be a positive integer", "global_batch=1")
    stages.info("comparing strategies of %s on %s GPUs", request.arch.name, f"{request.gpus:,}")
    tuned = tune(request, progress=_progress)
    return tuned, tuned.best.strategy


def _sweep(request: Request, strategy: Strategy, factors: Sequence[tuple[str, Sequence[float]]]) -> Study:
    """The factors around the request; sizes that were fixed stay so, except a factor's own."""
    stages.info("comparing strategies at every value of %s", ", ".join(name for name, _ in factors))
    return study(request, factors, strategy, progress=_progress)


def _progress(done: int, total: int) -> None:
    under_way(f"comparing: {done:,} of {total:,}")
