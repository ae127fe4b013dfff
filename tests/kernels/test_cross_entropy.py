"""A head's losses and gradients in one kernel: against the blocks of plain torch, and in the head's loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memfine_fx.kernels import choice
from memfine_fx.records.heads import HeadLoss
from memfine_fx.runtime.head_loop import HeadInputs, chunk_bounds, run_head
from tests.kernels.cases import DEVICE, in_kernels

pytestmark = in_kernels

LOSSES = [
    HeadLoss(),
    HeadLoss(label_smoothing=0.1),
    HeadLoss("sum", ignore_index=7, label_smoothing=0.2, scale=0.5, softcap=3.0),
]


def inputs(dtype: torch.dtype, loss: HeadLoss, vocab: int, tokens: int = 13) -> HeadInputs:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 16, generator=generator).to(DEVICE, dtype) for size in (tokens, vocab))
    labels = torch.randint(vocab, (tokens,), generator=generator)
    labels[::3] = loss.ignore_index
    labels[1], labels[2] = 0, vocab - 1
    return HeadInputs(hidden, weight, None, labels.to(DEVICE), None)


@pytest.mark.parametrize("vocab", [9, 4096, 4097, 9000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_the_loop_finds_what_it_finds_without_the_kernel(loss: HeadLoss, dtype: torch.dtype, vocab: int) -> None:
    from memfine_fx.kernels.cross_entropy import cross_entropy_

    given, bounds, wanted = inputs(dtype, loss, vocab), chunk_bounds(13, 5), (True, True, False)
    found, expected = (run_head(given, loss, bounds, wanted, kernel) for kernel in (cross_entropy_, None))
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)
    # In low precision both round the logits' gradients to it, from numbers that differ in their last place.
    tolerance = 1e-5 if dtype is torch.float32 else 4 * torch.finfo(dtype).eps
    for one, other in ((found.hidden, expected.hidden), (found.weight, expected.weight)):
        assert float((one - other).norm() / other.norm()) <= tolerance


def _gradient(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    from memfine_fx.kernels.cross_entropy import cross_entropy_

    changed = logits.clone()
    return cross_entropy_(changed, labels, HeadLoss(), torch.ones((), device=DEVICE)), changed


def test_entries_of_minus_infinity_have_no_share() -> None:
    logits = torch.randn(3, 5000, device=DEVICE)
    logits[:, :4500] = float("-inf")  # more than a block
    labels = torch.tensor([4600, 4999, 4500], device=DEVICE)
    leaf = logits.clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(leaf, labels, reduction="none")
    expected.sum().backward()
    losses, gradient = _gradient(logits, labels)
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-6, atol=1e-6)
    assert leaf.grad is not None
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-5, atol=1e-7)


def test_a_label_that_is_no_entry_makes_its_loss_no_number() -> None:
    losses, gradient = _gradient(torch.randn(3, 50, device=DEVICE), torch.tensor([4, 50, -1], device=DEVICE))
    assert losses.isnan().tolist() == [False, True, True]
    assert gradient.isnan().any(1).tolist() == [False, True, True]


def test_ignored_rows_have_no_gradient_whatever_they_hold() -> None:
    logits = torch.full((1, 50), float("nan"), device=DEVICE)
    losses, gradient = _gradient(logits, torch.tensor([-100], device=DEVICE))
    assert losses.tolist() == [0.0]
    assert not gradient.any()


def test_without_a_factor_logits_stay() -> None:
    from memfine_fx.kernels.cross_entropy import cross_entropy_

    logits = torch.randn(3, 50, device=DEVICE)
    before = logits.clone()
    losses = cross_entropy_(logits, torch.tensor([4, 9, -100], device=DEVICE), HeadLoss(), None)
    expected = torch.nn.functional.cross_entropy(before, torch.tensor([4, 9, -100], device=DEVICE), reduction="none")
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(logits, before)


def test_a_head_goes_over_blocks_where_the_kernel_does_not_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from memfine_fx.kernels import cross_entropy

    def fails(*arguments: object) -> Tensor:
        raise RuntimeError("no C compiler")

    choice._loss_kernel_runs.cache_clear()
    assert choice._loss_kernel_runs(DEVICE)
    choice._loss_kernel_runs.cache_clear()
    monkeypatch.setattr(cross_entropy, "cross_entropy_", fails)
    assert not choice._loss_kernel_runs(DEVICE)
    assert "its GPU kernel does not run here: no C compiler" in caplog.text
    choice._loss_kernel_runs.cache_clear()
