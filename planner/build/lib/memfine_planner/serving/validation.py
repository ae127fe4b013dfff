"""What the model says of published ratios (data/published.yaml): between devices, precisions, batches and phases.

Ratios are taken because absolute figures also measure a serving system's software. Nothing here was fitted to them: the
fractions of NVIDIA's rates come from training runs, the other vendors' are the defaults.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from memfine_planner.serving.choice import decode_options, prefill_options
from memfine_planner.serving.hardware import accelerators, architecture
from memfine_planner.serving.model import Instance, Model, decode_s, prefill_s
from memfine_planner.serving.workload import Lengths, Request, Share, Targets

__all__ = ["Compared", "compare", "comparison_table"]

_DATA = Path(__file__).parent / "data" / "published.yaml"
_LIMITS = Targets(first_token_s=0.4, token_s=0.04)


@dataclass(frozen=True)
class Compared:
    """A published ratio and the model's."""

    name: str
    published: float
    predicted: float
    checked: bool
    source: str

    @property
    def miss(self) -> float:
        """Predicted over published, minus 1."""
        return self.predicted / self.published - 1


@cache
def compare() -> tuple[Compared, ...]:
    """All published ratios."""
    ratios = yaml.safe_load(_DATA.read_text())["ratios"]
    return tuple(
        Compared(
            one["name"],
            one["published"],
            _value(**one["first"]) / _value(**one["second"]),
            one["checked"],
            one["source"],
        )
        for one in ratios
    )


def comparison_table() -> str:
    lines = [f"{'published':>9} {'model':>7} {'miss':>6}  checked"]
    for one in compare():
        checked = "yes" if one.checked else "no"
        lines.append(f"{one.published:9.2f} {one.predicted:7.2f} {one.miss:+6.0%}  {checked:7}  {one.name}")
    return "\n".join(lines)


def _value(
    what: str,
    model: Any,
    accelerator: str,
    prompt: int,
    tp: int = 1,
    batch: float = 1,
    output: int = 1,
    number: str = "BF16",
    cache_bytes: float = 2.0,
    replicated_attention: bool = False,
) -> float:
    served = Model(architecture(model), number, cache_bytes)
    on = Instance(accelerators()[accelerator], tp, 1, replicated_attention)
    first = prefill_s(served, on, prompt, batch)
    step = decode_s(served, on, batch, prompt + output / 2)
    if what.startswith("capacity"):
        lengths = (Lengths(prompt=prompt, output=output),)
        request = Request(model="", rate=1.0, lengths=lengths, targets=_LIMITS, pool={accelerator: Share(devices=tp)})
        options = (prefill_options if what == "capacity_prefill" else decode_options)(request, served, [on])
        return options[0].capacity
    values = {
        "first_token": first,
        "token": step,
        "prefill": batch * prompt / first / tp,
        "decode": batch / step / tp,
        "tokens": batch * output / (first + (output - 1) * step) / tp,
    }
    return values[what]
