"""A graph's heads through find, plan and lower; `pipeline` calls this between its own stages."""

from __future__ import annotations

import functools
import hashlib
import logging
from typing import Any

import sympy
import torch
from torch import fx

from memfine_fx.compiler.captured_graph import CapturedGraph, LoweredHead
from memfine_fx.compiler.session import Session, next_region_id
from memfine_fx.config import Config
from memfine_fx.kernels.choice import loss_kernel_on
from memfine_fx.memory.head_bytes import HeadBytes, HeadMemory
from memfine_fx.passes.dataflow import tensor_of
from memfine_fx.passes.head.find import find_heads
from memfine_fx.passes.lower.head import lower_head, take_apart
from memfine_fx.passes.modes import called_bodies
from memfine_fx.passes.pass_list import is_disabled, run_pass
from memfine_fx.plan.budget import choose_head_plan
from memfine_fx.records import Refusal
from memfine_fx.records.heads import HeadRegion
from memfine_fx.runtime.live import LiveHead, register_head

__all__ = ["lower_heads", "plan_heads"]

log = logging.getLogger(__name__)


def plan_heads(graph_module: fx.GraphModule, session: Session, record: CapturedGraph) -> list[LoweredHead | Refusal]:
    """The heads of a captured graph, each with the op's counterpart; nothing has touched the graph yet."""
    if is_disabled("heads"):
        return []
    try:
        bodies = [body for body, _ in called_bodies(graph_module)]
        candidates = [
            head
            for body in bodies
            for head in find_heads(
                body.graph, session.config, is_body=body is not graph_module, runs_here=session.observer.runs_here
            )
        ]
    except Exception:  # NOTE: a bug of ours must not take down a model that compiles without us
        log.warning("memfine_fx failed while it looked for heads; they stay as they were", exc_info=True)
        return []
    return [head if isinstance(head, Refusal) else _plan(head, session, record) for head in candidates]


def lower_heads(graph_module: fx.GraphModule, record: CapturedGraph, config: Config) -> None:
    """Rewrite the heads of a graph, and, where it holds anything chunked, what it returns of logits."""
    run_pass("heads", graph_module, lambda: _lower(graph_module, record, config), None)


def _lower(graph_module: fx.GraphModule, record: CapturedGraph, config: Config) -> None:
    heads = [head for head in record.heads if isinstance(head, LoweredHead)]
    if record.lowered:
        given_up = [node for head in heads if not head.region.saves_logits for node in head.region.results]
        record.returned = take_apart(graph_module, config, given_up)
    for head in heads:
        lower_head(graph_module, head.region, head.live.region_id)


def _plan(region: HeadRegion, session: Session, record: CapturedGraph) -> LoweredHead:
    hidden, loss = tensor_of(region.hidden), tensor_of(region.exit)
    region_id = next_region_id(f"head_{_content_hash(region, loss.dtype)}")
    kernel = loss_kernel_on(hidden.device) if session.observer.runs_here else None
    terms = HeadBytes(
        hidden=region.dims.hidden,
        vocab=region.dims.vocab,
        item_bytes=region.logits_dtype.itemsize,
        has_softcap=region.loss.softcap is not None,
        wanted=region.wanted,
        device_type=hidden.device.type if session.observer.runs_here else "cuda",  # `fit` records for a GPU on this CPU
        saves_logits=region.saves_logits,
        is_fused=kernel is not None or not session.observer.runs_here,
    )
    num_tokens: Any = tensor_of(region.labels).numel()
    is_symbolic = isinstance(num_tokens, torch.SymInt)
    expr: sympy.Expr = num_tokens.node.expr if is_symbolic else sympy.Integer(num_tokens)
    record.step.heads[region_id] = HeadMemory(terms, expr)
    live = LiveHead(
        region_id=region_id,
        loss=region.loss,
        kernel=kernel,
        out_dtype=loss.dtype,
        choose_plan=functools.partial(choose_head_plan, region_id, session.steps, record, hidden.device),
        name=region.where.module or str(region.where),
        context=session.steps.context_key,
    )
    register_head(live)
    hint = num_tokens.node.hint if is_symbolic else num_tokens
    return LoweredHead(region, live, None if hint is None else int(hint))


def _content_hash(region: HeadRegion, out_dtype: torch.dtype) -> str:
    """Return a hash of all that determines the head's op besides its arguments; it is the key of compiled code."""
    text = f"{region.loss} {region.dims.hidden} {region.dims.vocab} {region.logits_dtype} {out_dtype}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]
