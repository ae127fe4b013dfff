"""Each host x what is trained x the way in: all layers chunked, and the run of the host without memfine_fx."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trainers.hosts import COMPILED_BY_NAME_ALONE, HOSTS, NEEDS, NUM_LAYERS, OPTIONS, Trained

pytest.importorskip("transformers")


@functools.cache
def plain_run(host: str, kind: str, folder: Path) -> Trained:
    return HOSTS[host](kind, "plain", folder)


@pytest.mark.trainers
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("way", ["optimize", "backend"])
@pytest.mark.parametrize("kind", ["full", "attention", "experts"])
@pytest.mark.parametrize("host", HOSTS)
def test_all_layers_are_chunked_and_the_run_is_the_plain_one(
    host: str,
    kind: str,
    way: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    for package in (*NEEDS.get(host.split()[0], ()), *(("peft",) if kind != "full" else ())):
        pytest.importorskip(package)
    monkeypatch.setenv("MEMFINE_OPTIONS", "")
    plain = plain_run(host, kind, tmp_path.parent)
    found = HOSTS[host](kind, way, tmp_path)
    assert found.logged == pytest.approx(plain.logged, rel=1e-3, abs=1e-5)
    if (kind, way) == ("experts", "backend") and host in COMPILED_BY_NAME_ALONE:
        record_property("outcome", "told: optimize")
        assert not found.layers
        assert any("PEFT adds its adapters" in one and "call memfine_fx.optimize(model)" in one for one in found.told)
    else:
        assert found.layers == set(range(NUM_LAYERS))
        assert found.rows_per_chunk == {OPTIONS["rows_per_chunk"]}
        assert not found.told
