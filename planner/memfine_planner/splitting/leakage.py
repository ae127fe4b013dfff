"""How much of the input can be rebuilt from what a cut sends: a number in [0, 1] for every cut.

The attacker owns samples like the device's (the auxiliary set) and sees the tensors that the cut sends for them. It
fits a linear decoder from sent tensor to input by ridge regression, and where it also knows the device's weights it
searches the input whose sent tensor is the one it saw (model inversion by gradient). Leakage is the better of both on
samples kept aside:

    float inputs     1 - squared error / variance of the input, at least 0
    token inputs     fraction of tokens recovered above what guessing the commonest gets

An attack proves what leaks at least. A stronger attacker may rebuild more, so a bound on this number is a bound against
these attacks. Where no attack can be run the curve is given in the fleet file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from memfine_planner.splitting.graph import Cut, Traced, split

__all__ = ["leakage_curve", "reconstruction"]

_HELD_OUT = 0.25
_RIDGE = 1e-3
_LEARNING_RATE = 0.05


def leakage_curve(traced: Traced, cuts: Sequence[Cut], samples: Tensor, steps: int = 100) -> tuple[float, ...]:
    """Leakage of every cut; 0 where nothing is sent.

    Args:
        samples: attacked and auxiliary inputs [num, ...], a multiple of the traced batch.
        steps: of the gradient search; 0 leaves it out. Token inputs are attacked by the decoder alone.
    """
    halves = [split(traced, cut).device if cut.activation_bytes else None for cut in cuts]
    sent = [1.0 if cut.activation_bytes else 0.0 for cut in cuts]
    pairs = zip(halves, sent, strict=True)
    return tuple(one if half is None else reconstruction(half, samples, traced.batch, steps) for half, one in pairs)


def reconstruction(send: Callable[[Tensor], Tensor], samples: Tensor, batch: int, steps: int) -> float:
    """Leakage of a device's half `send`, called with `batch` samples at a time."""
    with torch.no_grad():
        sent = torch.cat([send(one) for one in _batches(samples, batch)])
    num_saved = max(batch, int(len(samples) * _HELD_OUT) // batch * batch)
    known, secret = samples[:-num_saved], samples[-num_saved:]
    if not samples.is_floating_point():
        return _tokens_recovered(sent[:-num_saved], known, sent[-num_saved:], secret)
    guess = _decode(sent[:-num_saved].flatten(1), known.flatten(1), sent[-num_saved:].flatten(1)).view_as(secret)
    best = _explained(guess, secret)
    if steps:
        pairs = zip(_batches(sent[-num_saved:], batch), _batches(guess, batch), strict=True)
        found = [_invert(send, *pair, steps) for pair in pairs]
        best = max(best, _explained(torch.cat(found), secret))
    return best


def _batches(samples: Tensor, batch: int) -> tuple[Tensor, ...]:
    return samples.chunk(len(samples) // batch)


def _decode(sent: Tensor, inputs: Tensor, seen: Tensor) -> Tensor:
    """Inputs [n, d] guessed by ridge regression for the tensors `seen`; solved in the smaller of both dimensions."""
    center, mean = sent.mean(0), inputs.mean(0)
    z, x = (sent - center).double(), (inputs - mean).double()
    is_wide = len(z) < z.shape[1]
    kernel = z @ z.T if is_wide else z.T @ z
    ridge = _RIDGE * kernel.diagonal().mean().clamp(min=1e-12) * torch.eye(len(kernel), dtype=torch.float64)
    solved: Tensor = torch.linalg.solve(kernel + ridge, x if is_wide else z.T @ x)
    return ((seen - center).double() @ (z.T @ solved if is_wide else solved)).to(inputs.dtype) + mean


def _invert(send: Callable[[Tensor], Tensor], seen: Tensor, start: Tensor, steps: int) -> Tensor:
    """The input whose sent tensor comes nearest to `seen`, searched from `start` by Adam."""
    guess = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([guess], lr=_LEARNING_RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        distance = torch.nn.functional.mse_loss(send(guess), seen)
        (guess.grad,) = torch.autograd.grad(distance, [guess])
        optimizer.step()
    return guess.detach()


def _explained(guess: Tensor, secret: Tensor) -> float:
    error = (guess - secret).square().mean()
    return float((1 - error / secret.var(unbiased=False).clamp(min=1e-12)).clamp(0, 1))


def _tokens_recovered(sent: Tensor, known: Tensor, seen: Tensor, secret: Tensor) -> float:
    """By a decoder from the tensor at a position [..., H] to the token there."""
    num_tokens = int(max(known.max(), secret.max())) + 1
    one_hot = torch.nn.functional.one_hot(known.flatten(), num_tokens).to(sent.dtype)
    guess = _decode(sent.flatten(0, -2), one_hot, seen.flatten(0, -2)).argmax(1)
    hits = float((guess == secret.flatten()).double().mean())
    chance = float((secret == known.flatten().mode().values).double().mean())
    return max(0.0, (hits - chance) / max(1e-12, 1 - chance))
