"""Flags of the command `memfine`: what each means, its default and an example, and how errors name it.

Nothing heavy is imported here, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

__all__ = ["PLANNERS", "add_flag", "add_output", "as_typed", "parser_of"]

PLANNERS = {
    "training": "which strategy trains a model fastest on a cluster",
    "serving": "which devices prefill, which decode, and how many",
    "split": "where to cut a model between devices and a server",
}
"""Planners of the package memfine-planner, and what each answers."""
_DTYPES = ("bfloat16", "float16", "float32")
_TARGET = "hf:MODEL_TYPE (toy size), e.g. hf:qwen3_moe, or path/to/file.py:factory"


class _Adds(Protocol):
    """A parser, or a group of one."""

    def add_argument(self, *names: str, **options: Any) -> argparse.Action: ...


def add_flag(
    parser: _Adds, *names: str, help: str, example: str = "", without: str = "", **options: Any
) -> argparse.Action:
    """Add a flag to a parser; its help says the default, and shows an example of a flag that takes a value.

    Args:
        names, options: as for `ArgumentParser.add_argument`.
        help: what the flag means.
        example: the value in the example.
        without: what happens without the flag, in words, where there is no default to show.
    """
    known = [] if options.get("required") else [f"default: {without or options.get('default', 'off')}"]
    known += [f"e.g. {names[0]} {example}"] if example else []
    return parser.add_argument(*names, help=f"{help} ({'; '.join(known)})".replace("%", "%%"), **options)


def parser_of(commands: Mapping[str, Callable[[argparse.Namespace], int]], version: str) -> argparse.ArgumentParser:
    """Return the parser of `memfine`.

    Args:
        commands: what runs each command; "bench" among them only where it is offered.
    """
    parser = argparse.ArgumentParser(prog="memfine", description="Chunked, recomputing MoE training for PyTorch.")
    parser.add_argument("--version", action="version", version=f"memfine {version}")
    subparsers = parser.add_subparsers(required=True, metavar=" | ".join(commands))
    for name, run in commands.items():
        _ADD[name](subparsers).set_defaults(run=run)
    return parser


def _add_demo(commands: Any) -> argparse.ArgumentParser:
    demo = _command(commands, "demo", "train a small Qwen3-MoE three ways and compare memory, time and loss")
    add_flag(demo, "--steps", type=_positive, default=8, metavar="N", help="training steps of each way", example="4")
    add_flag(demo, "--layers", type=_positive, default=4, metavar="N", help="layers of the model", example="2")
    add_flag(demo, "--out", default=".", metavar="FOLDER", help="where the chart and the JSON go", example="figures")
    add_flag(demo, "--quick", action="store_true", help="a smaller model")
    _add_quiet(demo)
    return demo


def _add_explain(commands: Any) -> argparse.ArgumentParser:
    explain = _command(commands, "explain", "what is found, chosen or refused in a model, and why")
    _add_model(explain)
    add_flag(
        explain, "--picture", metavar="FILE.svg", help="draw the graph of one chunked region", example="region.svg",
        without="no picture",
    )  # fmt: skip
    add_flag(explain, "--region", type=int, default=0, metavar="N", help="which region to draw", example="1")
    add_flag(explain, "--measure", action="store_true", help="also run a step and measure its peak")
    add_flag(
        explain, "--plot", type=_svg, metavar="FILE.svg", help="measure a step and draw its memory",
        example="step.svg", without="no plot",
    )  # fmt: skip
    return explain


def _add_verify(commands: Any) -> argparse.ArgumentParser:
    verify = _command(commands, "verify", "compare every rewrite of a model with what it replaces, in fp64")
    _add_model(verify)
    return verify


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("target", help=_TARGET)
    add_flag(
        command, "--experts", metavar="NAME", help="experts implementation of transformers", example="grouped_mm",
        without="the model's own",
    )  # fmt: skip
    add_flag(
        command, "--budget", metavar="BYTES", help="peak bytes of a step, or a fraction of the device's memory",
        example="20GiB", without="no limit",
    )  # fmt: skip
    add_flag(
        command, "--config", metavar="FILE.json", help="fields of memfine_fx.Config", example="config.json",
        without="MEMFINE_OPTIONS",
    )  # fmt: skip
    add_output(command)


def add_output(command: argparse.ArgumentParser) -> None:
    """Add --json and --quiet, as every command has them."""
    add_flag(command, "--json", action="store_true", help="the answer as JSON with exact bytes, without progress")
    _add_quiet(command)


def _add_quiet(command: argparse.ArgumentParser) -> None:
    add_flag(command, "-q", "--quiet", action="store_true", help="no progress; as MEMFINE_QUIET=1")


def _add_plan(commands: Any) -> argparse.ArgumentParser:
    plan = _command(
        commands,
        "plan",
        f"rows per chunk and bytes of one SwiGLU MoE layer; or plan {' | '.join(PLANNERS)}",
        "Planners of their own, with --help each: "
        + "; ".join(f"memfine plan {name}: {answer}" for name, answer in PLANNERS.items()),
    )
    sizes = (
        ("tokens", 8192, "tokens of a step, T", 4096),
        ("hidden", 2048, "hidden width, H", 4096),
        ("width", 768, "width of an expert, F", 1536),
        ("experts", 128, "number of experts, E", 64),
        ("top-k", 8, "experts of a token, K", 4),
    )
    for name, default, meaning, example in sizes:
        add_flag(plan, f"--{name}", type=_positive, default=default, metavar="N", help=meaning, example=str(example))
    add_flag(plan, "--dtype", choices=_DTYPES, default="bfloat16", help="of parameters and rows", example="float32")
    add_flag(
        plan, "--budget", metavar="BYTES", help="bytes the layer may use beyond parameters", example="800MB",
        without="no limit",
    )  # fmt: skip
    add_flag(plan, "--axis", choices=("rows", "tokens"), default="rows", help="what is chunked", example="tokens")
    add_flag(
        plan, "--rows", type=_positive, metavar="R", help="rows of a chunk at most", example="4096",
        without="the planner's choice",
    )  # fmt: skip
    add_flag(plan, "--device", choices=("cpu", "cuda"), default="cpu", help="where the layer would run", example="cuda")
    add_flag(plan, "--sweep", action="store_true", help="also bytes and chunks for other rows per chunk")
    add_flag(plan, "--front", action="store_true", help="the plans that none beats in both bytes and time")
    add_flag(
        plan, "--plot", type=_svg, metavar="FILE.svg", help="draw that front", example="front.svg", without="no plot",
    )  # fmt: skip
    add_flag(
        plan, "--measured", metavar="ROWS.jsonl", help="with --plot: peers' points of a benchmark's rows",
        example="benchmarks/results/budget_cpu.jsonl", without="none",
    )  # fmt: skip
    add_flag(plan, "--paper", action="store_true", help="MemFine's table and map of chunks by its closed form")
    add_output(plan)
    return plan


def _add_fit(commands: Any) -> argparse.ArgumentParser:
    fit = _command(
        commands,
        "fit",
        "whether a model trains within so many bytes, from its config alone",
        "Progress goes to stderr, the answer to stdout. Status 1: it does not fit the memory.",
    )
    fit.add_argument(
        "model",
        help="a folder, a config.json, a model type, a hub name, or path/to/file.py:factory of a module; "
        "e.g. Qwen/Qwen3-30B-A3B",
    )
    add_flag(fit, "--memory", metavar="BYTES", help="memory of the device", example="80GiB", without="bytes alone")
    add_flag(fit, "--gpu", metavar="NAME", help="the device by its name", example="h100", without="--memory")
    _add_batch(fit)
    _add_training(fit)
    add_flag(
        fit, "--budget", metavar="BYTES", help="memory_budget that optimize would be given, or least",
        example="60GiB", without="none",
    )  # fmt: skip
    add_flag(
        fit, "--fsdp", type=_positive, default=1, metavar="N", example="8",
        help="ranks that share parameters; bytes of one, an estimate",
    )  # fmt: skip
    add_flag(
        fit, "--expert-parallel", type=_positive, default=1, metavar="N", example="4",
        help="ranks that share experts; an estimate",
    )  # fmt: skip
    add_flag(fit, "--device", choices=("cpu", "cuda"), default="cuda", help="where it would train", example="cpu")
    add_flag(fit, "--even-routing", action="store_true", help="experts get equal numbers of rows")
    add_flag(
        fit, "--alternatives", action="store_true",
        help="also plain training, checkpointing, torch.compile's ratio, and LoRA",
    )  # fmt: skip
    add_flag(
        fit, "--html", metavar="FILE", help="one file with a chart and sliders for sizes and memory",
        example="fit.html", without="no page",
    )  # fmt: skip
    add_flag(fit, "--no-cache", action="store_true", help="do not show the stored answer of an earlier run")
    add_output(fit)
    return fit


def _add_batch(fit: argparse.ArgumentParser) -> None:
    add_flag(
        fit, "--batch", "--per-device-train-batch-size", type=_positive, default=1, metavar="N",
        help="sequences in a step", example="4",
    )  # fmt: skip
    add_flag(
        fit, "--seq", "--max-length", type=_positive, default=4096, metavar="TOKENS", help="tokens of each sequence",
        example="8192",
    )  # fmt: skip
    add_flag(
        fit, "--accumulate", "--gradient-accumulation-steps", type=_positive, default=1, metavar="N", example="8",
        help="micro-batches whose gradients are added before the optimizer steps",
    )  # fmt: skip


def _add_training(fit: argparse.ArgumentParser) -> None:
    add_flag(fit, "--train", choices=("full", "lora", "qlora"), default="full", help="what is trained", example="lora")
    add_flag(fit, "--lora-r", type=_positive, default=16, metavar="RANK", help="rank of the adapters", example="64")
    add_flag(
        fit, "--targets", "--lora-target-modules", nargs="+", default=(), metavar="NAME", example="q_proj v_proj",
        help="linear layers with adapters, or expert weights such as mlp.experts.gate_up_proj",
        without="all linear layers but the head",
    )  # fmt: skip
    add_flag(
        fit, "--lora-target-parameters", dest="target_parameters", nargs="+", default=(), metavar="NAME",
        help="more of them, by PEFT's name for expert weights", example="mlp.experts.down_proj", without="none",
    )  # fmt: skip
    add_flag(fit, "--dtype", choices=("fp32", "bf16", "fp16"), default="bf16", help="of parameters", example="fp32")
    add_flag(
        fit, "--optimizer", "--optim", choices=("adamw", "adamw8bit", "sgd", "adafactor"), default="adamw",
        help="of torch; adamw8bit of bitsandbytes", example="sgd",
    )  # fmt: skip
    add_flag(fit, "--master-weights", action="store_true", help="fp32 copies that the optimizer works on")
    add_flag(
        fit, "--checkpointing", "--gradient-checkpointing", action="store_true",
        help="checkpoint every layer of the model",
    )  # fmt: skip


def _add_bench(commands: Any) -> argparse.ArgumentParser:
    return _command(commands, "bench", "the benchmark harness of this checkout; see memfine bench --help")


_ADD: dict[str, Callable[[Any], argparse.ArgumentParser]] = {
    "demo": _add_demo,
    "explain": _add_explain,
    "fit": _add_fit,
    "verify": _add_verify,
    "plan": _add_plan,
    "bench": _add_bench,
}


def _command(commands: Any, name: str, help: str, epilog: str | None = None) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=help, description=help, epilog=epilog)
    return command


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be a positive int")
    return int(text)


def _svg(text: str) -> str:
    if not text.lower().endswith(".svg"):
        raise argparse.ArgumentTypeError(f"{text!r} must end in .svg")
    return text


_DESTINATIONS = {
    "memory_budget": "budget",
    "num_tokens": "tokens",
    "expert_width": "width",
    "num_experts": "experts",
    "rows_per_chunk": "rows",
}
"""Where arguments of functions are not named as the flags that give them."""


def as_typed(message: str, options: argparse.Namespace) -> str:
    """Return an error's message with arguments of functions, as in `memory='80GiB'`, named as the flags of a command.

    What no flag gave stays: an option of MEMFINE_OPTIONS, say.
    """
    not_flags = ("run", "target", "model", "config")
    typed_values = {
        name: value for name, value in vars(options).items() if name not in not_flags and value not in (None, ())
    }
    names = {name: name for name in typed_values} | {
        name: to for name, to in _DESTINATIONS.items() if to in typed_values
    }
    flags = {name: f"--{to.replace('_', '-')}" for name, to in names.items()}

    def with_value(match: re.Match[str]) -> str:
        name, value = match[1], match[2].strip("'")
        typed = typed_values[names[name]]
        if isinstance(typed, bool):
            return flags[name]
        return f"{flags[name]} {typed if isinstance(typed, str) else value}"

    known = "|".join(map(re.escape, sorted(flags, key=len, reverse=True)))
    text = re.sub(rf"(?<![\w.'-])(?:Config\.)?({known})=('[^']*'|\[[^]]*\]|[^\s,:;()]+)", with_value, message)
    bare = "|".join(name for name in _DESTINATIONS if name in flags)
    return re.sub(rf"(?<![\w.'-])(?:Config\.)?({bare})\b", lambda match: flags[match[1]], text) if bare else text
