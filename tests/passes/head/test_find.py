"""Finding heads: the spellings of projection and loss, and what leaves the logits whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfine_fx.config import Config
from memfine_fx.passes.head.find import find_heads
from memfine_fx.records import Refusal
from memfine_fx.records.heads import HeadLoss, HeadRegion
from tests.helpers import capture

H, V = 8, 64
ALWAYS = Config(chunks_head=True)


class Head(nn.Module):
    """A projection and some loss of its results."""

    def __init__(self, loss: Callable[[Head, Tensor, Tensor], object], bias: bool = False, vocab: int = V) -> None:
        super().__init__()
        self.body = nn.Linear(H, H)
        self.projection = nn.Linear(H, vocab, bias=bias)
        self.criterion = nn.CrossEntropyLoss()
        self.scale = 0.5
        self.loss = loss

    def forward(self, hidden: Tensor, labels: Tensor) -> object:
        return self.loss(self, self.body(hidden), labels)


def found_in(
    loss: Callable[[Head, Tensor, Tensor], object], config: Config = ALWAYS, *, vocab: int = V
) -> list[HeadRegion | Refusal]:
    labels = torch.randint(vocab, (2, 5))
    return find_heads(capture(Head(loss, vocab=vocab), torch.randn(2, 5, H), labels).graph, config)


def flat(head: Head, hidden: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(head.projection(hidden).view(-1, V), labels.view(-1))


def sized_by_the_logits(head: Head, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = head.projection(hidden)
    return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1), ignore_index=-1)


def shifted(head: Head, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = head.projection(hidden)[..., :-1, :].contiguous()
    result: Tensor = head.criterion(logits.view(-1, V), labels[..., 1:].contiguous().view(-1))
    return result


def transposed(head: Head, hidden: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(head.projection(hidden).float().transpose(1, 2), labels, reduction="sum")


def capped(head: Head, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = torch.tanh(head.projection(hidden) * head.scale / 3.0) * 3.0
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def negative_log_likelihood(head: Head, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = (hidden @ head.projection.weight.T).reshape(-1, V)
    return F.nll_loss(F.log_softmax(logits, dim=-1), labels.reshape(-1))


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        (flat, HeadLoss()),
        (sized_by_the_logits, HeadLoss(ignore_index=-1)),
        (shifted, HeadLoss()),
        (transposed, HeadLoss("sum")),
        (capped, HeadLoss(label_smoothing=0.1, scale=0.5 / 3.0, softcap=3.0)),
        (negative_log_likelihood, HeadLoss()),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_spelling_is_read(spelling: Callable[[Head, Tensor, Tensor], object], expected: HeadLoss) -> None:
    (head,) = found_in(spelling)
    assert isinstance(head, HeadRegion)
    assert (head.loss, head.dims.hidden, head.dims.vocab) == (expected, H, V)
    assert head.wanted == (True, True, False)
    assert head.results == ()


def test_a_sum_divided_by_a_number_of_items_is_one_head() -> None:
    def divided(head: Head, hidden: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(head.projection(hidden).view(-1, V), labels.view(-1), reduction="sum")
        return loss / (labels >= 0).sum()

    (head,) = found_in(divided)
    assert isinstance(head, HeadRegion)
    assert head.divisor is not None and head.exit.name != "cross_entropy"


def returned(head: Head, hidden: Tensor, labels: Tensor) -> object:
    logits = head.projection(hidden)
    return F.cross_entropy(logits.float().view(-1, V), labels.view(-1)), logits


def returned_of_many(head: Head, hidden: Tensor, labels: Tensor) -> object:
    logits = head.projection(hidden)
    return F.cross_entropy(logits.flatten(0, 1), labels.view(-1)), logits


def returned_in_fp32(head: Head, hidden: Tensor, labels: Tensor) -> object:
    """As accelerate returns what was computed under autocast."""
    logits = head.projection(hidden)
    loss = F.cross_entropy(logits.float().view(-1, V), labels.view(-1))
    return loss.float(), logits.to(torch.float32)


def shifted_and_returned(head: Head, hidden: Tensor, labels: Tensor) -> object:
    """The loss has logits of fewer tokens than are returned."""
    logits = head.projection(hidden)
    return F.cross_entropy(logits[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1)), logits


def scaled_and_returned(head: Head, hidden: Tensor, labels: Tensor) -> object:
    logits = head.projection(hidden) * head.scale
    return F.cross_entropy(logits.view(-1, V), labels.view(-1)), logits


def with_z_loss(head: Head, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = head.projection(hidden).view(-1, V)
    return F.cross_entropy(logits, labels.view(-1)) + logits.logsumexp(-1).square().mean()


def with_accuracy(head: Head, hidden: Tensor, labels: Tensor) -> object:
    logits = head.projection(hidden).view(-1, V)
    return F.cross_entropy(logits, labels.view(-1)), logits.argmax(-1)


def by_token(head: Head, hidden: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(head.projection(hidden).view(-1, V), labels.view(-1), reduction="none").mean()


def weighted(head: Head, hidden: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(head.projection(hidden).view(-1, V), labels.view(-1), weight=torch.ones(V))


def normalised(head: Head, hidden: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.layer_norm(head.projection(hidden), (V,)).view(-1, V), labels.view(-1))


def of_probabilities(head: Head, hidden: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(head.projection(hidden).view(-1, V), F.one_hot(labels.view(-1), V).float())


def of_no_projection(head: Head, hidden: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(hidden.repeat(1, 1, V // H).view(-1, V), labels.view(-1))


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (shifted_and_returned, "the logits are returned beside the loss"),
        (scaled_and_returned, "the logits are returned beside the loss"),
        (with_z_loss, "the logits are used elsewhere, by logsumexp at"),
        (with_accuracy, "the logits are used elsewhere, by argmax at"),
        (by_token, "reduction='none'"),
        (weighted, "the loss weighs classes"),
        (normalised, "layer_norm on the way of the logits to the loss is not known to treat tokens one by one"),
        (of_probabilities, "targets are probabilities of classes, not labels"),
        (of_no_projection, "repeat"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_refusal_names_reason_and_source_line(loss: Callable[[Head, Tensor, Tensor], object], reason: str) -> None:
    (refusal,) = found_in(loss)
    assert isinstance(refusal, Refusal)
    assert reason in refusal.details
    assert "test_find.py:" in refusal.where.source


@pytest.mark.parametrize(("loss", "result"), [(returned, "logits"), (returned_in_fp32, "to")])
def test_returned_logits_are_made_chunk_by_chunk_where_that_takes_no_longer(
    loss: Callable[[Head, Tensor, Tensor], object], result: str
) -> None:
    (head,) = found_in(loss)
    assert isinstance(head, HeadRegion)
    assert head.saves_logits and [node.name for node in head.results] == [result]
    inputs = torch.randn(2, 5, H, dtype=torch.bfloat16), torch.randint(V, (2, 5))
    graph = capture(Head(loss).bfloat16(), *inputs).graph
    (refusal,) = find_heads(graph, ALWAYS)  # its products would be in fp32
    assert isinstance(refusal, Refusal) and refusal.details == "the logits are returned beside the loss"
    (head,) = find_heads(graph, ALWAYS, runs_here=False)
    assert isinstance(head, HeadRegion) and head.saves_logits


@pytest.mark.parametrize(("tokens", "frozen", "found"), [(7, False, 0), (8, False, 1), (7, True, 1)])
def test_few_returned_logits_stay_where_the_gradient_of_the_weight_is_larger(
    tokens: int, frozen: bool, found: int
) -> None:
    """The op holds that gradient [V,H] from forward on."""
    vocab = 4096
    model = Head(returned_of_many, vocab=vocab)
    model.projection.requires_grad_(not frozen)
    graph = capture(model, torch.randn(1, tokens, H), torch.randint(vocab, (1, tokens))).graph
    assert [isinstance(one, HeadRegion) for one in find_heads(graph, Config())] == [bool(found)]


@pytest.mark.parametrize(("loss", "result"), [(returned, "logits"), (returned_in_fp32, "to")])
def test_returned_logits_can_be_given_up_where_gradients_are_wanted(
    loss: Callable[[Head, Tensor, Tensor], object], result: str
) -> None:
    given_up = Config(chunks_head=True, returns_logits=False)
    (head,) = found_in(loss, given_up)
    assert isinstance(head, HeadRegion)
    assert not head.saves_logits and [node.name for node in head.results] == [result]
    with torch.no_grad():
        (refusal,) = found_in(loss, given_up)
    assert isinstance(refusal, Refusal)
    assert "no gradients are wanted" in refusal.details


def test_only_large_vocabularies_are_heads_by_default() -> None:
    def loss(head: Head, hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(head.projection(hidden).flatten(0, 1), labels.flatten())

    assert found_in(loss, Config()) == []
    assert len(found_in(loss, Config(), vocab=5000)) == 1
    assert found_in(loss, Config(chunks_head=False), vocab=5000) == []


def test_what_is_frozen_is_not_wanted() -> None:
    head = Head(flat)
    head.projection.requires_grad_(False)
    (found,) = find_heads(capture(head, torch.randn(2, 5, H), torch.randint(V, (2, 5))).graph, ALWAYS)
    assert isinstance(found, HeadRegion)
    assert found.wanted == (True, False, False)
