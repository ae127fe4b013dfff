"""TORCH_TRACE: records that torch's tools show beside its own."""

from __future__ import annotations

import inspect

from memfine_fx.compat.checks import Feature, expect

__all__ = ["RECORDS", "trace_artifact"]


def trace_artifact(name: str, encoding: str, payload: str) -> None:
    """A record in TORCH_TRACE, which tlparse shows with its compilation; nothing where tracing is off."""
    if not RECORDS.holds():
        return
    from torch._logging._internal import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=lambda: payload)


def _check_records() -> None:
    from torch._logging._internal import trace_structured

    parameters = inspect.signature(trace_structured).parameters
    expect({"metadata_fn", "payload_fn"} <= set(parameters), f"a record takes {', '.join(parameters)}")


RECORDS = Feature(
    name="torch._logging._internal.trace_structured",
    package="torch",
    purpose="regions and graphs in TORCH_TRACE",
    seen=("2.11", "2.15"),
    fallback="TORCH_TRACE holds no records of memfine_fx; MEMFINE_LOGS shows the same.",
    check=_check_records,
)
