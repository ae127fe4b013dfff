"""Models without experts, full of what looks like routing: top-k, arg-max, gathers, lookups. Nothing is rewritten."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memfine_fx
from memfine_fx.demo.tiny import tiny_model

H = 16
DENSE_FAST = ("llama", "gpt2", "t5")
DENSE_SLOW = (
    "bert", "bart", "gemma2", "mistral", "phi", "opt", "gpt_neox", "bloom", "roberta", "electra", "falcon", "qwen3",
    "olmo2", "stablelm", "deberta-v2", "big_bird", "xlnet", "mamba",
)  # fmt: skip


class Layer(nn.Module):
    """A function of hidden states with one linear layer and a stack of matrices to tempt the finder."""

    def __init__(self, function: Callable[[Layer, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(H, H)
        self.stack = nn.Parameter(torch.randn(4, H, H) / 4)
        self.table = nn.Embedding(12, H)
        self.router = nn.Linear(H, 1)
        self.heads = nn.ModuleList(nn.Linear(H // 4, H // 4) for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.function(self, hidden)


def encoder(layer: Layer, hidden: Tensor) -> Tensor:
    """Attention over heads by a plain batched matmul with a stack of matrices."""
    queries = torch.einsum("bsh,nhd->bnsd", hidden, layer.stack)
    return F.scaled_dot_product_attention(queries, queries, queries).sum(1)


def sampled_tokens(layer: Layer, hidden: Tensor) -> Tensor:
    """Top-k sampling of tokens, then their embeddings through a linear layer."""
    scores, index = (hidden @ layer.table.weight.t()).topk(3, dim=-1)
    chosen = index.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1)
    return layer.linear(layer.table(chosen))


def weighted_lookups(layer: Layer, hidden: Tensor) -> Tensor:
    """A key-value memory: the k best rows of a table, summed by their scores."""
    scores, index = (hidden @ layer.table.weight.t()).topk(3, dim=-1)
    return layer.linear((layer.table(index) * scores.softmax(-1).unsqueeze(-1)).sum(-2))


def depth_routed(layer: Layer, hidden: Tensor) -> Tensor:
    """Mixture of depths: the k best tokens go through a block, the others pass by."""
    weight, index = layer.router(hidden).squeeze(-1).topk(4, dim=-1)
    index = index.unsqueeze(-1).expand(-1, -1, H)
    block = F.relu(layer.linear(hidden.gather(1, index))) * weight.sigmoid().unsqueeze(-1)
    return hidden.scatter_add(1, index, block)


def depth_routed_by_stack(layer: Layer, hidden: Tensor) -> Tensor:
    """Mixture of depths whose block multiplies the chosen tokens by a stack of matrices, all of them."""
    weight, index = layer.router(hidden).squeeze(-1).topk(4, dim=-1)
    chosen = hidden.gather(1, index.unsqueeze(-1).expand(-1, -1, H))
    block = torch.einsum("bkh,nhd->bkd", chosen, layer.stack) * weight.unsqueeze(-1)
    return hidden.scatter_add(1, index.unsqueeze(-1).expand(-1, -1, H), block)


def quantised(layer: Layer, hidden: Tensor) -> Tensor:
    """Product quantisation: the nearest code of each half, with straight-through gradients."""
    codes = layer.table.weight.view(12, 2, H // 2)
    halves = hidden.view(*hidden.shape[:-1], 2, H // 2)
    distance = (halves.unsqueeze(-3) - codes).pow(2).sum(-1)
    index = distance.argmin(-2)
    near = torch.stack([codes[index[..., 0], 0], codes[index[..., 1], 1]], dim=-2).reshape(hidden.shape)
    return layer.linear(hidden + (near - hidden).detach())


def residual_quantised(layer: Layer, hidden: Tensor) -> Tensor:
    for matrix in layer.stack:
        index = (hidden @ matrix).argmax(-1) % 12
        hidden = hidden - layer.table(index)
    return layer.linear(hidden)


def sparse_attention(layer: Layer, hidden: Tensor) -> Tensor:
    """Attention to the k best keys."""
    scores = hidden @ hidden.transpose(1, 2)
    best, index = scores.topk(3, dim=-1)
    keys = hidden[torch.arange(hidden.shape[0])[:, None, None], index]
    return layer.linear((best.softmax(-1).unsqueeze(-1) * keys).sum(2))


def masked_attention(layer: Layer, hidden: Tensor) -> Tensor:
    """Top-k scores scattered back into a mask."""
    scores = hidden @ hidden.transpose(1, 2)
    index = scores.topk(3, dim=-1).indices
    mask = torch.full_like(scores, float("-inf")).scatter(-1, index, 0.0)
    return torch.matmul((scores + mask).softmax(-1), hidden)


def head_choice(layer: Layer, hidden: Tensor) -> Tensor:
    """One matrix for the whole batch, chosen by the mean: an index, but not per token."""
    index = hidden.mean((0, 1)).view(4, -1).sum(-1).argmax()
    return hidden @ layer.stack[index]


def language_adapters(layer: Layer, hidden: Tensor) -> Tensor:
    """One matrix per sequence, chosen by a feature."""
    index = hidden.mean(1).view(hidden.shape[0], 4, -1).sum(-1).argmax(-1)
    return torch.bmm(hidden, layer.stack[index])


def pooled(layer: Layer, hidden: Tensor) -> Tensor:
    values, index = F.max_pool1d(hidden, 2, return_indices=True)
    return layer.linear(F.max_unpool1d(values, index, 2))


def sorted_tokens(layer: Layer, hidden: Tensor) -> Tensor:
    """Tokens sorted by a score, a linear layer, and back."""
    order = layer.router(hidden).squeeze(-1).argsort(-1)
    back = order.argsort(-1)
    gathered = hidden.gather(1, order.unsqueeze(-1).expand_as(hidden))
    return layer.linear(gathered).gather(1, back.unsqueeze(-1).expand_as(hidden))


def soft_mixture(layer: Layer, hidden: Tensor) -> Tensor:
    """Every expert on every token with soft weights: there is no routing to exploit."""
    weights = (hidden @ layer.stack[0])[..., :4].softmax(-1)
    return torch.einsum("bsn,bsh,nhd->bsd", weights, hidden, layer.stack)


def greedy_decoder(layer: Layer, hidden: Tensor) -> Tensor:
    state = hidden[:, 0]
    for _ in range(3):
        token = (state @ layer.table.weight.t()).argmax(-1)
        state = layer.linear(layer.table(token)) + state
    return state


def heads_of_codes(layer: Layer, hidden: Tensor) -> Tensor:
    """A list of linear layers over the parts of sampled embeddings: a list, but nothing that a routing fills."""
    parts = layer.table((hidden @ layer.table.weight.t()).argmax(-1)).view(*hidden.shape[:-1], 4, H // 4)
    heads = torch.stack([head(parts[:, :, place]) for place, head in enumerate(layer.heads)], dim=2)
    return hidden + heads.flatten(2)


TORCH_MODELS = (
    encoder, sampled_tokens, weighted_lookups, depth_routed, depth_routed_by_stack, quantised, residual_quantised,
    sparse_attention, masked_attention, head_choice, language_adapters, pooled, sorted_tokens, soft_mixture,
    greedy_decoder, heads_of_codes,
)  # fmt: skip


def assert_untouched(report: memfine_fx.Report) -> None:
    assert report.num_chunked == 0, str(report)
    assert not any("internal error" in region.reason for region in report.regions), str(report)


@pytest.mark.parametrize("function", TORCH_MODELS, ids=lambda function: function.__name__)
def test_a_layer_without_experts_is_left_alone(function: Callable[[Layer, Tensor], Tensor]) -> None:
    assert_untouched(memfine_fx.explain(Layer(function), torch.randn(2, 8, H)))


def test_a_torch_encoder_is_left_alone() -> None:
    layer = nn.TransformerEncoderLayer(H, 2, 32, batch_first=True)
    assert_untouched(memfine_fx.explain(layer, torch.randn(2, 8, H)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "model_type", [*DENSE_FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in DENSE_SLOW)]
)
def test_a_dense_transformer_is_left_alone(model_type: str) -> None:
    tiny = tiny_model(model_type, wants_experts=False)
    assert_untouched(memfine_fx.explain(tiny.module, **tiny.inputs))
