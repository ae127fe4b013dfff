"""The plugin for Axolotl, by Axolotl's own plugin manager; its trainer needs a GPU and is not run here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memfine_fx
from memfine_fx.demo.tiny import tiny_causal_lm

base = pytest.importorskip("axolotl.integrations.base")
pytestmark = pytest.mark.trainers

NAME = "memfine_fx.integrations.axolotl.MemfinePlugin"


def config(**options: Any) -> Any:
    from axolotl.utils.dict import DictDefault

    return DictDefault({"plugins": [NAME], **options})


def manager() -> Any:
    """With our plugin registered."""
    found = base.PluginManager.get_instance()
    found.register(NAME)
    return found


def test_a_loaded_model_is_optimized_with_the_options_of_the_file() -> None:
    plugins, model = manager(), tiny_causal_lm("qwen3_moe", num_hidden_layers=2)
    cfg = config(memfine={"inner_backend": "eager", "rows_per_chunk": 5})
    plugins.cfg = cfg
    plugins.post_model_load(cfg, model)
    tokens = torch.randint(1, 64, (2, 12))
    model(input_ids=tokens, labels=tokens).loss.backward()
    regions = memfine_fx.report(model).regions
    assert [region.status for region in regions] == ["chunked"] * 2
    assert {region.plan.rows_per_chunk for region in regions if region.plan is not None} == {5}


def test_the_experts_function_is_chosen_by_its_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    loaders = pytest.importorskip("axolotl.loaders.model")
    monkeypatch.setenv("MEMFINE_OPTIONS", "rows_per_chunk=5")
    loader = object.__new__(loaders.ModelLoader)
    loader.cfg, loader.model = (
        config(experts_implementation="memfine"),
        tiny_causal_lm("qwen3_moe", num_hidden_layers=2),
    )
    loader._configure_experts_implementation()
    tokens = torch.randint(1, 64, (2, 12))
    loader.model(input_ids=tokens, labels=tokens).loss.backward()
    assert memfine_fx.report(loader.model).num_chunked == 2


def test_the_schema_is_found_by_its_name() -> None:
    assert "memfine_fx.integrations.axolotl.MemfineArgs" in manager().get_input_args()
    from memfine_fx.integrations.axolotl import MemfineArgs

    assert MemfineArgs(memfine={"bins": [1, 2]}).memfine == {"bins": [1, 2]}


@pytest.mark.parametrize(
    ("options", "message"),
    [({"memory_bugdet": "1GiB"}, "unknown option 'memory_bugdet'"), ("1GiB", "not a list of NAME: VALUE")],
)
def test_what_the_file_cannot_mean_is_told_before_a_model_is_loaded(options: Any, message: str) -> None:
    from memfine_fx.integrations.axolotl import MemfinePlugin

    with pytest.raises(memfine_fx.ConfigError, match=message):
        MemfinePlugin().register(config(memfine=options))
