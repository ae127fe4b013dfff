"""The reconstruction attack: what it must recover, and that depth hides."""

import pytest
import torch
from torch import Tensor

from examples.split_models import small_cnn, small_transformer
from memfine_planner.splitting.graph import find_cuts, trace
from memfine_planner.splitting.leakage import leakage_curve, reconstruction


def test_invertible_map_is_seen_through_and_noise_is_not() -> None:
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(12, 12, generator=generator)
    samples = torch.randn(128, 12, generator=generator)
    assert reconstruction(lambda x: x @ mixing, samples, 8, 0) > 0.95
    assert reconstruction(lambda x: torch.randn(len(x), 12), samples, 8, 0) < 0.2


def test_gradient_search_finds_what_a_linear_decoder_misses() -> None:
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(6, 24, generator=generator)

    def bent(x: Tensor) -> Tensor:
        return torch.sin(2 * x @ mixing / 6)

    samples = torch.randn(64, 6, generator=generator)
    assert reconstruction(bent, samples, 8, 100) > reconstruction(bent, samples, 8, 0) + 0.005


def test_residual_stream_gives_tokens_away_at_every_depth() -> None:
    torch.manual_seed(0)
    model, _ = small_transformer(layers=1)
    traced = trace(model, torch.randint(0, 64, (4, 16)))
    cuts = find_cuts(traced)
    curve = leakage_curve(traced, cuts, torch.randint(0, 64, (64, 16)))
    assert curve[0] == 1.0 and curve[-1] == 0.0
    assert cuts[1].place.startswith("0 (embedding")
    # Before training the residual stream carries the token through every block.
    assert min(curve[:-1]) > 0.9


@pytest.mark.slow
def test_leakage_of_a_cnn_falls_with_depth() -> None:
    torch.manual_seed(0)
    model, example = small_cnn(batch=8, size=8)
    traced = trace(model, example)
    cuts = find_cuts(traced)
    # Smooth images: neighbours alike, as in photographs.
    coarse = torch.randn(96, 3, 2, 2)
    images = torch.nn.functional.interpolate(coarse, size=8, mode="bilinear")
    curve = leakage_curve(traced, cuts, images, steps=60)
    assert curve[0] == 1.0 and curve[1] > 0.9
    assert curve[-2] < curve[1]
