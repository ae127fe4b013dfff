"""Every peer computes what the eager block computes, or says why it cannot run."""

from dataclasses import replace

import pytest

from benchmarks.peers import find_peer
from benchmarks.peers.base import needs
from benchmarks.suites import jobs_of
from benchmarks.worker import measure
from benchmarks.workloads.model import build_model_workload
from tests.benchmarks.rows import EAGER, TINY

SIZES = replace(TINY, sequence=2048)  # two chunks of 2048 rows


@pytest.mark.parametrize("peer", ["eager+checkpoint", "diy", "diy-c3", "batched_mm", "fcda-c4", "fcda-mact1500"])
def test_eager_peers_compute_the_same(peer: str) -> None:
    pytest.importorskip("transformers")
    job = replace(EAGER, sizes=SIZES, steps=1)
    expected = measure(job)

    found = measure(replace(job, peer=peer))

    assert found.value == pytest.approx(expected.value, rel=1e-4)
    assert found.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-4)
    assert found.gradient_checksum == pytest.approx(expected.gradient_checksum, abs=1e-4)


@pytest.mark.parametrize(
    "name", ["memfine-R512", "memfine-T64", "memfine-800MB", "memfine-mact900", "diy-c4+compile", "fcda-c8"]
)
def test_families_have_members_by_number(name: str) -> None:
    assert find_peer("layer", name).name == name


@pytest.mark.parametrize("name", ["memfine-R", "diy-c", "diy-c4+", "fcda-c", "tutel"])
def test_what_is_no_peer_is_refused(name: str) -> None:
    with pytest.raises(KeyError):
        find_peer("layer", name)


def test_a_missing_package_and_a_missing_device_are_named() -> None:
    assert needs("no_such_package_here")("cpu") == "no_such_package_here not installed"
    assert needs("torch", cuda=True)("cpu") == "its kernels need a CUDA device"
    assert needs("torch", cuda=True)("cuda") is None


def test_the_model_has_its_own_checkpointing() -> None:
    assert find_peer("model", "eager+checkpoint").wrap is not find_peer("layer", "eager+checkpoint").wrap


@pytest.mark.parametrize("name", ["diy", "diy+checkpoint"])
def test_chunks_by_hand_change_no_model(name: str) -> None:
    job = next(job for job in jobs_of("model", quick=True, peers=["eager"], steps=1) if job.peer == "eager")
    job = replace(job, sizes=replace(job.sizes, sequence=1024))  # 2048 tokens, two chunks across sequences
    expected, found = (build_model_workload(replace(job, peer=peer)) for peer in ("eager", name))
    assert float(found.step()) == pytest.approx(float(expected.step()), rel=1e-5)
    assert found.gradient_norm() == pytest.approx(expected.gradient_norm(), rel=1e-4)
