"""verify: agreement is reported with its controls, and a rewrite that is wrong anywhere is caught and not used."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

import memfine_fx
from memfine_fx.compiler import regions as compiler_regions
from memfine_fx.demo.tiny import tiny_causal_lm
from memfine_fx.errors import ConfigError
from memfine_fx.models import MixtralConfig, MixtralMoE, NaiveConfig, NaiveMoE
from memfine_fx.passes.verify.region import _ROUTINGS
from memfine_fx.runtime import op
from tests.integration.comparison import assert_same_step, run_step

EAGER = memfine_fx.Config(inner_backend="eager")


def layer(spelling: str = "gathered") -> MixtralMoE:
    return MixtralMoE(MixtralConfig(hidden=16, expert_width=24, spelling=spelling))


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 64, (2, 12))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(
    ("family", "spelling", "is_checkpointed"),
    [("qwen3_moe", "grouped_mm", False), ("gpt_oss", "batched_mm", True)],
)
def test_a_model_is_verified_with_its_controls(family: str, spelling: str, is_checkpointed: bool) -> None:
    model = tiny_causal_lm(family, experts_implementation=spelling)
    if is_checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    report = memfine_fx.verify(model, config=EAGER, **tokens())
    assert report.has_passed, str(report)
    assert len(report.regions) == 2
    assert 0 < report.worst_error < 1e-6
    for region in report.regions:
        assert region.identity_error == 0.0
        assert region.corrupted_error is not None and region.corrupted_error > 1e-4
        assert {check.routing for check in region.checks} == {"captured", *_ROUTINGS}


def test_bf16_is_held_to_what_the_original_itself_achieves() -> None:
    report = memfine_fx.verify(layer("grouped").to(torch.bfloat16), torch.randn(40, 16).bfloat16(), config=EAGER)
    (region,) = report.regions
    assert region.has_passed, str(report)
    assert region.worst is not None and 1e-4 < region.worst.original_error < 1e-1


def test_slices_of_tokens_are_verified() -> None:
    config = memfine_fx.Config(inner_backend="eager", axis="tokens")
    assert memfine_fx.verify(layer(), torch.randn(40, 16), config=config).has_passed


def test_inductor_bodies_are_verified() -> None:
    assert memfine_fx.verify(layer(), torch.randn(40, 16)).has_passed


@pytest.mark.parametrize(("num_tokens", "top_k"), [(1, 2), (5, 8)])
def test_corners_of_t_and_k(num_tokens: int, top_k: int) -> None:
    moe = MixtralMoE(MixtralConfig(hidden=16, expert_width=24, spelling="gathered", top_k=top_k))
    report = memfine_fx.verify(moe, torch.randn(num_tokens, 16), config=EAGER)
    assert report.has_passed and len(report.regions) == 1, str(report)


def _off_by_a_percent(results: Any, place: int) -> Any:
    return [one if index != place else one * 1.01 for index, one in enumerate(results)]


def _corrupt_backward(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    exact = op.run_backward
    monkeypatch.setattr(op, "run_backward", lambda *args, **kwargs: _off_by_a_percent(exact(*args, **kwargs), place))


def _corrupt_forward(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    exact = op.run_forward
    monkeypatch.setattr(op, "run_forward", lambda *args: exact(*args) * 1.0001)


@pytest.mark.filterwarnings("ignore:memfine_fx found nothing to chunk")
@pytest.mark.parametrize(
    ("corrupt", "place", "named"),
    [
        (_corrupt_forward, 0, "output"),
        (_corrupt_backward, 0, "d tokens"),
        (_corrupt_backward, 1, "d "),
        (_corrupt_backward, 2, "d l_self_modules_experts"),
    ],
    ids=["output", "tokens", "routing weight", "expert parameters"],
)
def test_a_wrong_rewrite_is_refused_and_the_layer_stays_exact(
    monkeypatch: pytest.MonkeyPatch, corrupt: Callable[..., None], place: int, named: str
) -> None:
    corrupt(monkeypatch, place)
    monkeypatch.setattr(compiler_regions, "check_gradients", lambda *args: "")  # another proof, which comes first
    moe = layer()
    optimized = memfine_fx.optimize(copy.deepcopy(moe), verify=True, inner_backend="eager", dynamic=True)
    assert_same_step(optimized, moe, {"hidden": torch.randn(30, 16)})
    (region,) = memfine_fx.report(optimized).regions
    assert region.status == "refused"
    assert region.reason.startswith(f"verification failed: {named}"), region.reason


def test_a_failed_verification_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _corrupt_forward(monkeypatch, 0)
    monkeypatch.setattr(compiler_regions, "check_gradients", lambda *args: "")  # another proof, which comes first
    report = memfine_fx.verify(layer(), torch.randn(30, 16), config=EAGER)
    assert not report.has_passed and len(report.regions) == 1 and report.refused == ()


def test_optimize_with_verify_uses_what_passes_and_says_how_exact_it_is() -> None:
    moe = layer()
    optimized = memfine_fx.optimize(copy.deepcopy(moe), verify=True, inner_backend="eager", dynamic=True)
    assert_same_step(optimized, moe, {"hidden": torch.randn(30, 16)})
    (region,) = memfine_fx.report(optimized).regions
    assert region.status == "chunked"
    assert region.verified_error is not None and region.verified_error < 1e-6
    assert "verified to" in str(region)
    assert region.num_chunks > 0


def test_verification_is_no_step_of_the_region() -> None:
    optimized = memfine_fx.optimize(layer(), verify=True, inner_backend="eager")
    run_step(optimized, {"hidden": torch.randn(30, 16)})
    (region,) = memfine_fx.report(optimized).regions
    assert region.num_tokens == 30


def test_what_is_refused_is_listed_and_is_no_failure() -> None:
    report = memfine_fx.verify(NaiveMoE(NaiveConfig(hidden=16)), torch.randn(20, 16), config=EAGER)
    assert report.has_passed
    assert report.regions or report.refused


def test_a_verify_report_is_text_and_json() -> None:
    report = memfine_fx.verify(layer(), torch.randn(20, 16), config=EAGER)
    assert "1 of 1 rewritten regions verified" in str(report)
    assert "identity 0.0e+00" in str(report)
    assert json.loads(report.to_json())["regions"][0]["identity_error"] == 0.0


def test_verify_wants_a_module() -> None:
    with pytest.raises(ConfigError, match=r"verify expects a torch\.nn\.Module, got int"):
        memfine_fx.verify(3)  # type: ignore[arg-type]  # the error under test
