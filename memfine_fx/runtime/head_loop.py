"""Projection, cross-entropy and their gradients, chunk by chunk over tokens.

No [T,V] tensor is made, but for logits that are asked for.

The loss is a number, so its gradient scales those of everything before it, and they can be made in forward, while a
chunk's logits are there (as Liger-Kernel and Inductor's auto chunker do): three products a token instead of the four
that recomputing logits in backward takes.

1. What a token's loss is divided by, 1/d = m * 2^e with m in [0.5, 1): gradients are made times m, and 2^e is left for
   backward, where multiplying by it rounds nothing. Without it gradients of fp16 would vanish, and those of bf16 would
   be rounded twice.
2. A chunk's logits go into one buffer and become gradients in place: by one kernel on a GPU, elsewhere by way of
   probabilities, in fp32, a few rows at once.
3. From these the gradients of the chunk's tokens; those of weight and bias are sums over chunks. All are stored in
   fp32, because backward multiplies them once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from memfine_fx.memory.head_bytes import BLOCK_BYTES, product_rows, rows_at_once
from memfine_fx.records.heads import HeadLoss

__all__ = ["HeadInputs", "HeadResults", "LossKernel", "chunk_bounds", "run_head"]

LossKernel = Callable[[torch.Tensor, torch.Tensor, HeadLoss, torch.Tensor | None], torch.Tensor]
"""(logits [R,V], labels [R], loss, factor: one number or None) -> losses [R] in fp32.

With a factor, it writes the gradient of the logits, times that factor, over the logits.
"""


@dataclass(frozen=True)
class HeadInputs:
    """hidden [T,H], weight [V,H], bias [V] or None, labels [T], divisor: one number or None."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    labels: torch.Tensor
    divisor: torch.Tensor | None


@dataclass(frozen=True)
class HeadResults:
    """The loss, and its gradients up to a power of two.

    Args:
        loss: fp32, one number.
        power: 2^e, fp32, one number.
        hidden: [T,H], fp32; empty, as the others are, where it is not wanted.
        weight: [V,H], fp32.
        bias: [V], fp32.
    """

    loss: torch.Tensor
    power: torch.Tensor
    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor

    @staticmethod
    def empty(hidden: torch.Tensor, weight: torch.Tensor, wanted: tuple[bool, bool, bool]) -> HeadResults:
        """Results of the right shapes; also on fake tensors."""
        vocab, width = weight.shape
        return HeadResults(
            hidden.new_empty((), dtype=torch.float32),
            hidden.new_empty((), dtype=torch.float32),
            hidden.new_empty(hidden.shape if wanted[0] else (0,), dtype=torch.float32),
            weight.new_empty((vocab, width) if wanted[1] else (0,), dtype=torch.float32),
            weight.new_empty((vocab,) if wanted[2] else (0,), dtype=torch.float32),
        )


def chunk_bounds(num_tokens: int, rows: int) -> list[tuple[int, int]]:
    """(first, past the last) token of chunks of at most `rows`, as even as their number allows."""
    num_chunks = -(-num_tokens // max(1, rows))
    return [(num_tokens * i // num_chunks, num_tokens * (i + 1) // num_chunks) for i in range(num_chunks)]


def run_head(
    inputs: HeadInputs,
    loss: HeadLoss,
    bounds: Sequence[tuple[int, int]],
    wanted: tuple[bool, bool, bool],
    returned: torch.Tensor | None = None,
    *,
    kernel: LossKernel | None = None,
) -> HeadResults:
    """The loss and the wanted gradients (of hidden, weight, bias), chunk by chunk.

    Args:
        returned: where logits go, [T,V].
        kernel: computes a chunk's losses and gradients; without one they are computed block by block.
    """
    results = HeadResults.empty(inputs.hidden, inputs.weight, wanted)
    divisor = _divisor(inputs, loss)
    mantissa, exponent = torch.frexp(torch.where(divisor == 0, torch.ones_like(divisor), 1 / divisor))
    results.power.copy_(torch.ldexp(torch.ones_like(divisor), exponent))
    total = torch.zeros_like(divisor)
    # Chunks write their tokens' gradients; the first writes those of weight and bias, to which the others add.
    for place in (results.weight, results.bias) if not bounds else ():
        place.zero_()
    largest = max((stop - start for start, stop in bounds), default=0)  # not always the first
    buffer = inputs.hidden.new_empty((largest, inputs.weight.shape[0]))
    for start, stop in bounds:
        hidden, labels = inputs.hidden[start:stop], inputs.labels[start:stop]
        logits = _project(hidden, inputs.weight, inputs.bias, buffer[: stop - start])
        if returned is not None:
            returned[start:stop].copy_(logits)
        total += _to_gradients(logits, labels, loss, mantissa if any(wanted) else None, kernel)
        is_added = start > bounds[0][0]
        if wanted[0] or wanted[1]:
            hidden_place = results.hidden[start:stop] if wanted[0] else None
            weight_place = results.weight if wanted[1] else None
            _multiply(hidden_place, weight_place, logits, hidden, inputs.weight, is_added=is_added)
        if wanted[2]:
            bias_grad = logits.sum(0, dtype=torch.float32)
            results.bias.add_(bias_grad) if is_added else results.bias.copy_(bias_grad)
    results.loss.copy_(total / divisor)
    return results


def _divisor(inputs: HeadInputs, loss: HeadLoss) -> torch.Tensor:
    """Return the number by which the sum over tokens is divided, in fp32."""
    if loss.reduction == "mean":
        return (inputs.labels != loss.ignore_index).sum().to(torch.float32)
    if inputs.divisor is None:
        return torch.ones((), dtype=torch.float32, device=inputs.hidden.device)
    return inputs.divisor.reshape(()).to(inputs.hidden.device, torch.float32)


def _project(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    if bias is None:
        return torch.mm(hidden, weight.t(), out=out)
    return torch.addmm(bias, hidden, weight.t(), out=out)


def _to_gradients(
    logits: torch.Tensor, labels: torch.Tensor, loss: HeadLoss, factor: torch.Tensor | None, kernel: LossKernel | None
) -> torch.Tensor:
    """The sum of the tokens' losses; with a factor, logits become its gradient times that factor."""
    if kernel is not None:
        return kernel(logits, labels, loss, factor).sum()
    block_bytes = BLOCK_BYTES.get(logits.device.type, BLOCK_BYTES["cuda"])
    num_rows = rows_at_once(block_bytes, 4 * logits.shape[1])
    blocks = zip(torch.split(logits, num_rows), torch.split(labels, num_rows), strict=True)
    return torch.stack([_block_to_gradients(*block, loss, factor) for block in blocks]).sum()


def _block_to_gradients(
    block: torch.Tensor, labels: torch.Tensor, loss: HeadLoss, factor: torch.Tensor | None
) -> torch.Tensor:
    logits = block.to(torch.float32)  # the block itself where it is fp32
    if loss.scale != 1.0:
        logits.mul_(loss.scale)
    capped = None
    if loss.softcap is not None:
        capped = logits.tanh_()
        logits = capped * loss.softcap
    counts = (labels != loss.ignore_index).unsqueeze(1)
    targets = torch.where(counts, labels.unsqueeze(1), 0)
    peaks = logits.amax(1, keepdim=True)
    log_shares = logits.gather(1, targets)
    smoothing = loss.label_smoothing
    if smoothing:
        log_shares = log_shares * (1 - smoothing) + logits.mean(1, keepdim=True) * smoothing
    sums = logits.sub_(peaks).exp_().sum(1, keepdim=True)
    losses = torch.where(counts, peaks + sums.log() - log_shares, 0.0)
    if factor is not None:
        weights = counts * factor
        logits.mul_(weights / sums)
        if smoothing:
            logits.sub_(weights * (smoothing / logits.shape[1]))
        logits.scatter_(1, targets, logits.gather(1, targets) - weights * (1 - smoothing))
        if capped is not None and loss.softcap is not None:
            logits.mul_(capped.square_().neg_().add_(1).mul_(loss.softcap))
        if loss.scale != 1.0:
            logits.mul_(loss.scale)
        if logits.data_ptr() != block.data_ptr():
            block.copy_(logits)
    return losses.sum()


def _multiply(
    hidden_place: torch.Tensor | None,
    weight_place: torch.Tensor | None,
    gradients: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    is_added: bool,
) -> None:
    """Gradients [R,V] @ weight [V,H] into one fp32 place; gradients.T @ hidden [R,H] into another, or on to it.

    In low precision no product is rounded. CUDA multiplies low precision into fp32, and adds to what is there as it
    writes. The CPU walks the vocabulary in parts and multiplies copies of them; in fp32 the one part is everything, and
    nothing is copied.

    Args:
        is_added: whether `weight_place` holds the sums of earlier chunks; else it is not read.
    """
    num_rows = weight.shape[0]
    if gradients.dtype is not torch.float32:
        if gradients.device.type == "cuda":
            if hidden_place is not None:
                torch.mm(gradients, weight, out_dtype=torch.float32, out=hidden_place)
            if weight_place is not None and is_added:
                torch.addmm(weight_place, gradients.t(), hidden, out_dtype=torch.float32, out=weight_place)
            elif weight_place is not None:
                torch.mm(gradients.t(), hidden, out_dtype=torch.float32, out=weight_place)
            return
        num_rows = product_rows(hidden.shape[0], hidden.shape[1])
    wide_hidden = hidden if weight_place is None else hidden.to(torch.float32)
    for start in range(0, weight.shape[0], num_rows):
        part = slice(start, start + num_rows)
        wide = gradients[:, part].to(torch.float32)
        if hidden_place is not None:
            hidden_place.addmm_(wide, weight[part].to(torch.float32), beta=int(start > 0))
        if weight_place is not None:
            weight_place[part].addmm_(wide.t(), wide_hidden, beta=int(is_added))
        del wide  # before the next part's copy is made
