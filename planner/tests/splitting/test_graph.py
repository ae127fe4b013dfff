"""Cuts of traced graphs: where they lie, what they cost, and that the halves are the model."""

import pytest
import torch
from torch import Tensor, nn

from examples.split_models import small_cnn, small_transformer
from memfine_fx.errors import ConfigError
from memfine_planner.splitting.graph import find_cuts, split, trace


class Skip(nn.Module):
    """A branch around two layers: no single tensor inside it carries everything."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.c(x + self.b(x).relu())


class Tied(nn.Module):
    """The embedding's table is the output projection, used on both sides of every cut between."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, 8))
        self.middle = nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.middle(nn.functional.embedding(ids, self.table)) @ self.table.T


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.conv(x)).relu_().mean((2, 3)))


def test_no_cut_lies_between_the_ends_of_a_branch() -> None:
    cuts = find_cuts(trace(Skip(), torch.randn(4, 8)))
    assert [cut.place for cut in cuts] == ["input", "a (linear)", "model (add)", "c (linear)"]


def test_figures_are_those_of_the_layers() -> None:
    first, after_a, after_add, last = find_cuts(trace(Skip(), torch.randn(4, 8)))
    flops = 2 * 8 * 8
    assert [cut.device_flops for cut in (first, after_a, after_add, last)] == [0, flops, 2 * flops, 3 * flops]
    assert [cut.server_flops for cut in (first, after_a, after_add, last)] == [3 * flops, 2 * flops, flops, 0]
    assert [cut.activation_bytes for cut in (first, after_a, after_add, last)] == [32, 32, 32, 0]
    layer = (64 + 8) * 4
    assert [cut.device_parameter_bytes for cut in (first, after_a, after_add, last)] == [0, layer, 2 * layer, 3 * layer]


def test_parameter_used_on_both_sides_forbids_the_cut() -> None:
    cuts = find_cuts(trace(Tied(), torch.randint(0, 16, (4, 6))))
    assert [cut.place for cut in cuts] == ["input", "model (matmul)"]


@pytest.mark.parametrize("kind", ["cnn", "transformer"])
def test_halves_give_the_models_output_and_gradients(kind: str) -> None:
    torch.manual_seed(0)
    model, example = small_cnn(batch=2, size=8) if kind == "cnn" else small_transformer(batch=2, layers=1)
    traced = trace(model, example)
    expected = model(example)
    expected.square().mean().backward()
    reference = {name: one.grad.clone() for name, one in model.named_parameters()}
    cuts = find_cuts(traced)
    assert len(cuts) >= 6
    for cut in cuts:
        model.zero_grad()
        halves = split(traced, cut)
        sent = halves.device(example) if halves.device else example
        received = sent.detach().requires_grad_(sent.is_floating_point())
        result = halves.server(received) if halves.server else sent
        result.square().mean().backward()
        if halves.server and halves.device:
            sent.backward(received.grad)
        assert torch.equal(result, expected)
        for name, one in model.named_parameters():
            assert torch.equal(one.grad, reference[name]), (cut.place, name)


def test_running_statistics_are_written_by_one_half() -> None:
    model = Norm()
    traced = trace(model, torch.randn(4, 3, 6, 6))
    for cut in find_cuts(traced):
        halves = split(traced, cut)
        before = int(model.norm.num_batches_tracked)
        sent = halves.device(torch.randn(4, 3, 6, 6)) if halves.device else torch.randn(4, 3, 6, 6)
        if halves.server:
            halves.server(sent)
        assert int(model.norm.num_batches_tracked) == before + 1, cut.place


@pytest.mark.slow
def test_transformers_model_is_cut_at_its_residual_stream() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=32, use_cache=False,
    )  # fmt: skip

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = transformers.Qwen2ForCausalLM(config)

        def forward(self, ids: Tensor) -> Tensor:
            return self.inner(input_ids=ids).logits

    cuts = find_cuts(trace(Logits().eval(), torch.randint(0, 32, (2, 8))))
    assert len(cuts) >= 6
    assert {cut.activation_bytes for cut in cuts[1:-1]} == {8 * 16 * 4}


def test_two_outputs_are_refused() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x + 1, x * 2

    with pytest.raises(ConfigError, match="returns 2 values; expected one tensor"):
        trace(Two(), torch.randn(2, 3))


def test_what_cannot_be_traced_is_named() -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(ConfigError, match=r"torch\.export cannot trace Branch"):
        trace(Branch(), torch.randn(2, 3))


def test_model_of_two_arguments_is_named() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    with pytest.raises(ConfigError, match=r"torch\.export cannot trace Two: missing a required argument: 'y'"):
        trace(Two(), torch.randn(2, 3))


def test_constant_result_and_example_without_a_batch_are_refused() -> None:
    class Size(nn.Module):
        def forward(self, x: Tensor) -> int:
            return x.shape[0]

    with pytest.raises(ConfigError, match="returns the constant 2; expected one tensor"):
        trace(Size(), torch.randn(2, 3))
    for example in (torch.tensor(1.0), torch.zeros(0, 3)):
        with pytest.raises(ConfigError, match=r"the example has the shape \[.*\]; expected a batch"):
            trace(nn.Identity(), example)
