"""Losses of a chunk's logits, and their gradients in place: each row [V] is read twice and written once.

Before:  logits in fp32, scaled and capped; maximum, sum of exponentials, label's share; then the gradient: ten passes
After:   one kernel, a program a row: maximum and sum in one pass (the sum is brought to each higher maximum: Milakov &
         Gimelshein, arXiv 1805.02867), the gradient in a second
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from memfine_fx.kernels.launches import Tiles, launch
from memfine_fx.records.heads import HeadLoss

__all__ = ["cross_entropy_"]

_BLOCK = 4096  # entries at a time; in fp32 16 of each of 256 threads


@triton.jit
def _load_logits(places, is_entry, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """Load (the logits that exponentials are taken of, the tanh in them where they are capped), in fp32.

    The first are minus infinity where there is no entry.
    """
    logits = tl.load(places, mask=is_entry, other=0).to(tl.float32) * SCALE
    bent = logits
    if SOFTCAP != 0:
        bent = 2 * tl.sigmoid(2 * logits) - 1
        logits = bent * SOFTCAP
    return tl.where(is_entry, logits, float("-inf")), bent


@triton.jit
def _cross_entropy_kernel(
    logits, labels, factor, losses, VOCAB: tl.constexpr, IGNORED: tl.constexpr, SMOOTHING: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WRITES_GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * VOCAB
    label = tl.load(labels + number)
    if label == IGNORED:
        tl.store(losses + number, 0.0)
        if WRITES_GRADIENT:
            for first in range(0, VOCAB, BLOCK):
                columns = first + tl.arange(0, BLOCK)
                tl.store(row + columns, tl.zeros([BLOCK], logits.dtype.element_ty), mask=columns < VOCAB)
        return
    # A label that no entry has would be a loss like any other, and nothing here can raise.
    is_known = (label >= 0) & (label < VOCAB)
    at_label, _unread = _load_logits(row + label, is_known, SCALE, SOFTCAP)
    # Every place of a block has a maximum and a sum of its own, so that no step of the loop waits for other threads. A
    # finite number begins, because minus infinity less itself is none.
    peaks = tl.full([BLOCK], -3.38e38, tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    plain_sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, VOCAB, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        values, bent = _load_logits(row + columns, columns < VOCAB, SCALE, SOFTCAP)
        higher = tl.maximum(peaks, values)
        sums = sums * tl.exp(peaks - higher) + tl.exp(values - higher)
        peaks = higher
        if SMOOTHING != 0:
            plain_sums += tl.where(columns < VOCAB, values, 0.0)
    peak = tl.max(peaks, 0)
    total = tl.sum(sums * tl.exp(peaks - peak), 0)
    loss = peak + tl.log(total) - at_label * (1 - SMOOTHING)
    if SMOOTHING != 0:
        loss -= tl.sum(plain_sums, 0) * (SMOOTHING / VOCAB)
    tl.store(losses + number, tl.where(is_known, loss, float("nan")))
    if WRITES_GRADIENT:
        weight = tl.where(is_known, tl.load(factor), float("nan"))
        for first in range(0, VOCAB, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            is_column = columns < VOCAB
            values, bent = _load_logits(row + columns, is_column, SCALE, SOFTCAP)
            share = tl.exp(values - peak) / total - tl.where(columns == label, 1.0 - SMOOTHING, 0.0)
            gradient = weight * (share - SMOOTHING / VOCAB)
            if SOFTCAP != 0:
                gradient *= (1 - bent * bent) * SOFTCAP
            tl.store(row + columns, (gradient * SCALE).to(logits.dtype.element_ty), mask=is_column)


def cross_entropy_(
    logits: torch.Tensor, labels: torch.Tensor, loss: HeadLoss, factor: torch.Tensor | None
) -> torch.Tensor:
    """Return the tokens' losses, [R] in fp32; NaN where a label is no entry of the vocabulary.

    Its reference in plain torch is the block loop of `runtime.head_loop`.

    Args:
        logits: [R,V], contiguous; with a factor they become their gradient times it.
        labels: [R] int64.
        factor: one number in fp32, or None where no gradient is wanted.
    """
    num_rows, vocab = logits.shape
    losses = logits.new_empty((num_rows,), dtype=torch.float32)
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    constants = {
        "VOCAB": vocab,
        "IGNORED": loss.ignore_index,
        "SMOOTHING": loss.label_smoothing,
        "SCALE": loss.scale,
        "SOFTCAP": loss.softcap or 0.0,
        "WRITES_GRADIENT": factor is not None,
        "BLOCK": block,
    }
    arguments = {
        "logits": logits,
        "labels": labels,
        "factor": losses if factor is None else factor,
        "losses": losses,
    }
    launch(_cross_entropy_kernel, (num_rows,), arguments, constants, Tiles(1, block, 1, num_warps=8, num_stages=3))
    return losses
