"""`memfine plan split`: which device cuts a model where, with what share of server and link."""

from __future__ import annotations

import argparse
import json
import pickle
from collections.abc import Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memfine_fx.errors import ConfigError
from memfine_fx.flags import add_flag, add_output
from memfine_fx.progress import stages
from memfine_fx.units import readable_bytes
from memfine_planner.splitting.baselines import all_local, all_offloaded, equal_share, exhaustive, random_cuts
from memfine_planner.splitting.graph import Cut, Traced, find_cuts, load_model, trace
from memfine_planner.splitting.latency import Device, Fleet, Offers, load_fleet, offers, seconds
from memfine_planner.splitting.leakage import leakage_curve
from memfine_planner.splitting.market import Plan, choose

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["add_parser", "run"]

_EXHAUSTIVE_CHOICES = 5_000


def add_parser(commands: Commands) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "split",
        help="where devices cut a model in split federated training",
        description="Every device picks its cut and its shares of the server from its own configuration and posted "
        "prices, so that the slowest device's round is shortest. Beside it: a proven bound, the optimum "
        "of small fleets, and plain ways.",
    )
    add_flag(
        parser, "--model", required=True, help="path/to/file.py:factory, which returns (module, example batch)",
        example="models.py:tiny",
    )  # fmt: skip
    add_flag(
        parser, "--fleet", type=Path, required=True, help="devices and server, YAML or JSON",
        example="examples/split_fleet.yaml",
    )  # fmt: skip
    add_flag(
        parser, "--attack", type=Path, metavar="SAMPLES.pt", example="samples.pt", without="the fleet file says it",
        help="measure every cut's leakage by rebuilding these inputs",
    )  # fmt: skip
    add_output(parser)
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> int:
    """Print the plan; errors of ours are raised for the caller to print."""
    torch.manual_seed(0)
    fleet = load_fleet(options.fleet)
    stages.info("tracing %s", options.model)
    traced = trace(*load_model(options.model))
    cuts = find_cuts(traced)
    leakage = _leakage(options.attack, fleet, traced, cuts)
    stages.info("choosing cuts of %d devices", len(fleet.devices))
    devices = [offers(cuts, device, fleet.server, leakage) for device in fleet.devices]
    plan = choose(devices)
    others = _others(devices)
    if options.json:
        print(json.dumps(_record(fleet, cuts, leakage, devices, plan) | {"others_s": others}, indent=2))
    else:
        tables = _cut_table(cuts, leakage), _plan_table(fleet.devices, cuts, devices, plan), _comparison(plan, others)
        print(*tables, sep="\n\n")
    return 0


def _leakage(path: Path | None, fleet: Fleet, traced: Traced, cuts: Sequence[Cut]) -> tuple[float, ...]:
    """Measured on the samples of a file, or of the fleet file, or none where no device asks for it."""
    if path is not None:
        stages.info("rebuilding inputs from what each of %d cuts sends", len(cuts))
        return leakage_curve(traced, cuts, _samples(path, traced))
    missing = [cut.node for cut in cuts if cut.node not in fleet.leakage]
    if fleet.leakage and missing:
        raise ConfigError(f"fleet file: leakage has no value for the cuts {', '.join(missing)}")
    unknown = sorted(set(fleet.leakage) - {cut.node for cut in cuts})
    if unknown:
        raise ConfigError(
            f"fleet file: leakage.{unknown[0]}: the model has no such cut; it has {', '.join(cut.node for cut in cuts)}"
        )
    bounded = [device.name for device in fleet.devices if device.max_leakage < 1]
    if bounded and missing:
        raise ConfigError(
            f"device {bounded[0]}: max_leakage needs the cuts' leakage; pass --attack SAMPLES.pt, or give it in the "
            f"fleet file for {', '.join(cut.node for cut in cuts)}"
        )
    return tuple(fleet.leakage[cut.node] for cut in cuts) if fleet.leakage else ()


def _samples(path: Path, traced: Traced) -> Tensor:
    try:
        loaded = torch.load(path)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise ConfigError(f"--attack {path}: cannot be read as a tensor saved by torch.save") from error
    example = traced.input.meta["val"]
    expected = f"{example.dtype} [num, {', '.join(str(size) for size in example.shape[1:])}]"
    if not isinstance(loaded, Tensor) or loaded.shape[1:] != example.shape[1:] or loaded.dtype != example.dtype:
        raise ConfigError(f"--attack {path}: expected a tensor {expected}")
    num = len(loaded) // traced.batch * traced.batch
    if num < 2 * traced.batch:
        raise ConfigError(f"--attack {path}: {len(loaded)} samples; expected at least {2 * traced.batch}")
    return loaded[:num]


def _others(devices: Sequence[Offers]) -> dict[str, float]:
    found = {
        "equal share": equal_share(devices).round_s,
        "all local": all_local(devices).round_s,
        "all offloaded": all_offloaded(devices).round_s,
        "random": random_cuts(devices),
    }
    if prod(len(own.cuts) for own in devices) <= _EXHAUSTIVE_CHOICES:
        return {"optimum": exhaustive(devices).round_s, **found}
    return found


def _cut_table(cuts: Sequence[Cut], leakage: Sequence[float]) -> str:
    lines = [f"{'cut':24}{'device MFLOP':>14}{'server MFLOP':>14}{'sent':>12}{'parameters':>12}{'leakage':>9}"]
    for index, cut in enumerate(cuts):
        shown = f"{leakage[index]:9.2f}" if leakage else f"{'-':>9}"
        sent, parameters = readable_bytes(round(cut.activation_bytes)), readable_bytes(cut.device_parameter_bytes)
        lines.append(
            f"{cut.place:24}{cut.device_flops / 1e6:14.3f}{cut.server_flops / 1e6:14.3f}{sent:>12}"
            f"{parameters:>12}{shown}"
        )
    return "\n".join(["per sample, forward", *lines])


def _plan_table(fleet: Sequence[Device], cuts: Sequence[Cut], devices: Sequence[Offers], plan: Plan) -> str:
    lines = [f"{'device':12}{'cut':24}{'server':>8}{'link':>8}{'seconds':>10}"]
    rows = zip(fleet, devices, plan.positions, plan.server_shares, plan.link_shares, strict=True)
    for device, own, position, server, link in rows:
        place = cuts[own.cuts[position]].place
        took = seconds(own, position, server, link)
        lines.append(f"{device.name:12}{place:24}{server:8.1%}{link:8.1%}{took:10.3f}")
    return "\n".join(lines)


def _comparison(plan: Plan, others: dict[str, float]) -> str:
    lines = [
        f"round {plan.round_s:.3f} s after {plan.postings:,} postings of prices; "
        f"no plan is faster than {plan.bound_s:.3f} s (gap at most {max(0.0, plan.round_s / plan.bound_s - 1):.2%})"
    ]
    return "\n".join(
        lines + [f"  {name:14}{took:10.3f} s  {took / plan.round_s:6.2f} x" for name, took in others.items()]
    )


def _record(
    fleet: Fleet, cuts: Sequence[Cut], leakage: Sequence[float], devices: Sequence[Offers], plan: Plan
) -> dict[str, object]:
    nodes = [cuts[own.cuts[at]].node for own, at in zip(devices, plan.positions, strict=True)]
    names = [device.name for device in fleet.devices]
    return {
        "cuts": [asdict(cut) for cut in cuts],
        "leakage": leakage,
        "devices": names,
        "cut_at": nodes,
        **asdict(plan),
    }
