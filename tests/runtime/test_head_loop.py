"""The head's op against PyTorch's own loss: the loss, and the gradients of tokens, weight and bias."""

from __future__ import annotations

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor

from memfine_fx.errors import DoubleBackwardError
from memfine_fx.memory.head_bytes import HeadBytes
from memfine_fx.memory.measure import trace_memory
from memfine_fx.records.heads import HeadLoss, HeadPlan
from memfine_fx.runtime.head import head_loss
from memfine_fx.runtime.head_loop import HeadInputs, chunk_bounds, run_head
from memfine_fx.runtime.live import LiveHead, register_head

T, H, V, R = 37, 16, 500, 10
PLAIN = HeadLoss()
LOSSES = [
    PLAIN,
    HeadLoss("sum"),
    HeadLoss(label_smoothing=0.1),
    HeadLoss(scale=0.5),
    HeadLoss("sum", ignore_index=7, label_smoothing=0.2, scale=0.5, softcap=3.0),
]
Operands = tuple[Tensor, Tensor, Tensor]

HELD: list[LiveHead] = []
"""The registered head, which lives as long as somebody holds it."""


def operands(dtype: torch.dtype = torch.float32, tokens: int = T) -> Operands:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator) for shape in ((tokens, H), (V, H), (V,))]
    hidden, weight, bias = (one.to(dtype).requires_grad_() for one in drawn)
    return hidden, weight, bias


def labels_for(loss: HeadLoss, tokens: int = T) -> Tensor:
    labels = torch.randint(V, (tokens,), generator=torch.Generator().manual_seed(1))
    labels[::3] = loss.ignore_index
    return labels


def as_double(found: Operands) -> Operands:
    hidden, weight, bias = (one.detach().double().requires_grad_() for one in found)
    return hidden, weight, bias


def plain(given: Operands, labels: Tensor, loss: HeadLoss, upcast: torch.dtype = torch.float32) -> Tensor:
    logits = F.linear(*given) * loss.scale
    if loss.softcap is not None:
        logits = loss.softcap * logits.tanh()
    return F.cross_entropy(
        logits.to(upcast),
        labels,
        ignore_index=loss.ignore_index,
        reduction=loss.reduction,
        label_smoothing=loss.label_smoothing,
    )


def chunked(
    given: Operands,
    labels: Tensor,
    loss: HeadLoss,
    *,
    rows: int = R,
    divisor: Tensor | None = None,
    wanted: tuple[bool, bool, bool] = (True, True, True),
) -> Tensor:
    plan = HeadPlan(rows, 0, "")
    HELD[:] = [LiveHead(region_id="test", loss=loss, out_dtype=torch.float32, choose_plan=lambda tokens: plan)]
    register_head(HELD[0])
    found: Tensor = head_loss(*given, labels, divisor, list(wanted), False, "test")[0]
    return found


def error(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None and expected is not None
    truth = expected.detach().double()
    return float((found.detach().double() - truth).norm() / truth.norm().clamp_min(1e-30))


@pytest.mark.parametrize("loss", LOSSES, ids=str)
@pytest.mark.parametrize("rows", [1, R, T])
def test_the_loss_and_every_gradient_are_those_of_the_plain_loss(loss: HeadLoss, rows: int) -> None:
    ours, theirs, labels = operands(), operands(), labels_for(loss)
    found, expected = chunked(ours, labels, loss, rows=rows), plain(theirs, labels, loss)
    (3 * found).backward()
    (3 * expected).backward()
    assert error(found, expected) < 1e-5
    for one, other in zip(ours, theirs, strict=True):
        assert error(one.grad, other.grad) < 1e-5


@pytest.mark.parametrize("loss", LOSSES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_no_further_from_the_truth_than_the_plain_loss(loss: HeadLoss, dtype: torch.dtype) -> None:
    """The loss is divided by a number that is no power of two, as when gradients are accumulated."""
    tokens = 400
    ours, theirs, labels = operands(dtype, tokens), operands(dtype, tokens), labels_for(loss, tokens)
    exact = as_double(ours)
    (chunked(ours, labels, loss, rows=20) / 3).backward()
    (plain(theirs, labels, loss) / 3).backward()
    (plain(exact, labels, loss, torch.float64) / 3).backward()
    for one, other, truth in zip(ours, theirs, exact, strict=True):
        assert error(one.grad, truth.grad) <= 1.25 * error(other.grad, truth.grad)


def test_a_loss_scaled_for_fp16_keeps_small_gradients() -> None:
    """The mean's division would make them vanish in forward, before the scaler's factor arrives in backward."""
    tokens = 1000
    ours, theirs, labels = operands(torch.float16, tokens), operands(torch.float16, tokens), labels_for(PLAIN, tokens)
    exact = as_double(ours)
    for given in (ours, theirs, exact):  # flat probabilities, each near 1/V
        given[1].data.mul_(1e-3)
        given[2].data.zero_()
    (65536 * chunked(ours, labels, PLAIN)).backward()
    (65536 * plain(theirs, labels, PLAIN)).backward()
    (65536 * plain(exact, labels, PLAIN, torch.float64)).backward()
    for one, other, truth in zip(ours, theirs, exact, strict=True):
        assert error(one.grad, truth.grad) <= 1.25 * error(other.grad, truth.grad)


def test_a_sum_is_divided_by_the_divisor() -> None:
    loss, divisor = HeadLoss("sum"), torch.tensor(23)
    ours, theirs, labels = operands(), operands(), labels_for(PLAIN)
    chunked(ours, labels, loss, divisor=divisor).backward()
    (plain(theirs, labels, loss) / divisor).backward()
    for one, other in zip(ours, theirs, strict=True):
        assert error(one.grad, other.grad) < 1e-5


def test_without_a_valid_label_the_mean_is_nan_and_gradients_are_zero_as_in_eager() -> None:
    ours, theirs = operands(), operands()
    labels = torch.full((T,), -100)
    found, expected = chunked(ours, labels, PLAIN), plain(theirs, labels, PLAIN)
    found.backward()
    expected.backward()
    assert found.isnan() and expected.isnan()
    for one, other in zip(ours, theirs, strict=True):
        assert one.grad is not None and other.grad is not None
        assert not one.grad.any() and not other.grad.any()


def test_without_any_token_gradients_are_zero() -> None:
    ours = operands(tokens=0)
    chunked(ours, labels_for(PLAIN, 0), HeadLoss("sum")).backward()
    assert all(one.grad is not None and not one.grad.any() for one in ours)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_frozen_has_no_gradient_and_no_memory(place: int) -> None:
    ours, theirs, labels = operands(), operands(), labels_for(PLAIN)
    for given in (ours, theirs):
        given[place].requires_grad_(False)
    wanted = (place != 0, place != 1, place != 2)
    chunked(ours, labels, PLAIN, wanted=wanted).backward()
    plain(theirs, labels, PLAIN).backward()
    assert ours[place].grad is None
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert number == place or error(one.grad, other.grad) < 1e-5
    results = head_loss(*(one.detach() for one in ours), labels, None, list(wanted), True, "test")
    assert results[2 + place].numel() == 0


def test_under_autocast_the_op_multiplies_in_the_dtype_of_its_arguments() -> None:
    given, labels = operands(), labels_for(PLAIN)
    alone = chunked(given, labels, PLAIN)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(chunked(given, labels, PLAIN), alone)


def test_second_derivatives_are_refused() -> None:
    given = operands()
    loss = chunked(given, labels_for(PLAIN), PLAIN)
    with pytest.raises(DoubleBackwardError, match="chunks_head=False"):
        torch.autograd.grad(loss, given[0], create_graph=True)


def test_a_label_outside_the_vocabulary_is_an_error() -> None:
    labels = labels_for(PLAIN)
    labels[1] = V
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        chunked(operands(), labels, PLAIN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wanted", [(True, True, False), (True, False, False), (False, True, False)], ids=str)
@pytest.mark.parametrize("tokens", [300, 299], ids=["even", "second chunk larger"])
def test_what_is_measured_is_just_under_the_terms(
    tokens: int, dtype: torch.dtype, wanted: tuple[bool, bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several chunks, and in low precision several parts of the vocabulary in each."""
    monkeypatch.setattr("memfine_fx.memory.head_bytes._PRODUCT_BYTES", 1 << 20)
    width, vocab, rows = 64, 5000, 100
    hidden, weight = torch.randn(tokens, width).to(dtype), torch.randn(vocab, width).to(dtype)
    inputs = HeadInputs(hidden, weight, None, torch.randint(vocab, (tokens,)), None)
    terms = HeadBytes(width, vocab, dtype.itemsize, has_softcap=False, wanted=wanted, device_type="cpu")
    bounds = chunk_bounds(tokens, rows)
    cpu = torch.device("cpu")
    measured = trace_memory(lambda: run_head(inputs, PLAIN, bounds, wanted), cpu, collects_garbage=False).peak_bytes
    assert 0.9 * terms.peak(tokens, rows) <= measured <= terms.peak(tokens, rows)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("wanted", [(True, True, True), (True, False, False), (False, True, False)], ids=str)
@pytest.mark.parametrize("item_bytes", [2, 4])
def test_terms_of_an_expression_are_those_of_a_number(
    item_bytes: int, wanted: tuple[bool, bool, bool], device_type: str
) -> None:
    """The page of an answer shows bytes at sizes that are chosen there."""
    terms = HeadBytes(64, 5000, item_bytes, has_softcap=True, wanted=wanted, device_type=device_type, saves_logits=True)
    tokens = sympy.Symbol("T", integer=True, positive=True)
    rows = sympy.Min(tokens, 256)
    for number in (100, 1000):
        at = {tokens: number}
        assert sympy.sympify(terms.workspace(rows)).subs(at) == terms.workspace(min(number, 256))
        assert sympy.sympify(terms.results(tokens)).subs(at) == terms.results(number)


def test_chunks_are_even_and_none_is_too_large() -> None:
    assert chunk_bounds(10, 4) == [(0, 3), (3, 6), (6, 10)]
    assert chunk_bounds(0, 4) == []
    assert max(stop - start for start, stop in chunk_bounds(1001, 64)) <= 64
