"""`memfine plan serving`: which devices prefill and which decode, in instances of what size, and how many."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from memfine_fx.flags import add_flag, add_output
from memfine_fx.progress import stages
from memfine_fx.units import readable_bytes
from memfine_planner.serving.choice import Fleet, Option, make_fleet
from memfine_planner.serving.hardware import accelerators, architecture
from memfine_planner.serving.model import Model, handover_s
from memfine_planner.serving.validation import comparison_table
from memfine_planner.serving.workload import Request, load_request

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["add_parser", "run"]

_EXAMPLE = Path(__file__).parent / "data" / "request.yaml"


def add_parser(commands: Commands) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "serving",
        help="which devices prefill and which decode a model, and how many",
        description="The cheapest instances for prefill and for decode, of any vendors in a pool, that keep the "
        "targets for time to first token and between tokens at a request rate.",
    )
    add_flag(
        parser, "--request", type=Path, default=_EXAMPLE, help="what is served, YAML or JSON", example="request.yaml",
        without="an example that is built in",
    )  # fmt: skip
    add_flag(parser, "--rate", type=float, help="requests per second", example="20", without="the file's")
    add_flag(
        parser, "--accelerators", type=Path, help="YAML or JSON of further devices, as hardware/data/vendors.yaml",
        example="devices.yaml", without="none",
    )  # fmt: skip
    add_flag(parser, "--check", action="store_true", help="compare the model with published ratios instead")
    add_output(parser)
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> int:
    """Print the fleet; errors of ours are raised for the caller to print."""
    if options.check:
        print(comparison_table())
        return 0
    request = load_request(options.request, rate=options.rate)
    stages.info("choosing instances for %s at %g requests/s", request.model, request.rate)
    fleet = make_fleet(request, accelerators(options.accelerators))
    if options.json:
        phases = {"prefill": fleet.prefill, "decode": fleet.decode}
        rows = {name: [{**asdict(one), "count": count} for one, count in used] for name, used in phases.items()}
        record = {**rows, "price": fleet.price, "devices": fleet.devices}
        print(json.dumps(record, default=lambda accelerator: accelerator.name, indent=2))
    else:
        print(_text(request, fleet))
    return 0


def _text(request: Request, fleet: Fleet) -> str:
    targets = request.targets
    lines = [
        f"{request.model}, {request.rate:g} requests/s; {targets.percentile:.0%} of first tokens within "
        f"{targets.first_token_s:g} s, of tokens within {targets.token_s:g} s",
        f"{'phase':9}{'instances':>10}  {'device':14}{'TP':>4}{'PP':>4}{'requests/s each':>17}{'price':>9}",
    ]
    for phase, used in (("prefill", fleet.prefill), ("decode", fleet.decode)):
        lines += [_row(phase, one, count) for one, count in used]
    lines.append(f"{fleet.devices} devices, {fleet.price:.2f} per hour")
    model = Model(architecture(request.model), request.number, request.cache_bytes)
    length = max(one.prompt for one in request.lengths)
    pairs = [(one.instance, other.instance) for one, _ in fleet.prefill for other, _ in fleet.decode]
    slowest = max(handover_s(model, *pair, length) for pair in pairs)
    lines.append(
        f"cache of the longest prompt: {readable_bytes(round(length * model.cache_bytes_per_token))}, handed over in "
        f"{slowest:.3f} s"
    )
    return "\n".join(lines)


def _row(phase: str, one: Option, count: int) -> str:
    on = one.instance
    return (
        f"{phase:9}{count:10}  {on.accelerator.name:14}{on.tp:4}{on.pp:4}{one.capacity:17.2f}{one.price * count:9.2f}"
    )
