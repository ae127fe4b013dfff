"""The paper's formulas, its table and its map of chunks; what must hold of any sizes."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memfine_fx.errors import BudgetInfeasible, ConfigError
from memfine_fx.memory.closed_form import (
    PAPER_BINS,
    Architecture,
    Parallel,
    activation_bytes,
    activation_sets,
    chunk_count,
    max_rows,
    sequence_bytes,
    snap_to_bins,
    static_bytes,
)
from memfine_fx.memory.published import (
    ALPHA,
    GB,
    IMBALANCE,
    M_GPU,
    METHODS,
    MODEL,
    PARALLEL,
    Imbalance,
    Method,
    expert_loads,
    layer_chunks,
    rank_rows,
    received_rows,
    render,
)

STATIC_I = 43.0 * GB
WHOLE = 22.9


@pytest.mark.parametrize("method", METHODS, ids=lambda method: f"{method.model} {method.name}")
def test_active_memory_is_the_printed_one(method: Method) -> None:
    active = activation_bytes(MODEL, PARALLEL, received_rows(), chunks=method.chunks)
    assert active / GB == pytest.approx(method.active_gb, abs=0.3)


@pytest.mark.parametrize(("chunks", "saved"), [(2, 48.03), (8, 83.84)])
def test_savings_are_the_printed_ones(chunks: int, saved: float) -> None:
    active = activation_bytes(MODEL, PARALLEL, received_rows(), chunks=chunks)
    assert 100 * (1 - active / (WHOLE * GB)) == pytest.approx(saved, abs=1.5)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: f"{method.model} {method.name}")
def test_what_trained_fits_and_what_ran_out_of_memory_does_not(method: Method) -> None:
    active = activation_bytes(MODEL, PARALLEL, received_rows(), chunks=method.chunks)
    assert (method.static_gb * GB + active <= M_GPU) == method.trains


def test_the_sequence_part_is_the_constant_that_the_printed_figures_share() -> None:
    constant = 2 * 11.9 - WHOLE
    assert sequence_bytes(MODEL, PARALLEL) / GB == pytest.approx(constant, abs=0.01)


@pytest.mark.parametrize("imbalance", IMBALANCE, ids=lambda imbalance: f"layer {imbalance.layer}")
def test_reconstructed_loads_meet_all_that_is_printed(imbalance: Imbalance) -> None:
    loads = expert_loads(imbalance)
    below, above = sorted(loads)[252:254]
    assert sum(loads) == pytest.approx(4096 * 256, rel=1e-6)
    assert (loads[0], loads[-1]) == (imbalance.largest, imbalance.smallest)
    assert below <= imbalance.p99 <= above
    assert loads == sorted(loads, reverse=True)


def test_only_hot_experts_on_one_gpu_receive_the_rows_behind_the_printed_memory() -> None:
    fullest = max(rank_rows(imbalance) for imbalance in IMBALANCE)
    spread = max(rank_rows(imbalance, shares_hottest=False) for imbalance in IMBALANCE)
    assert fullest == pytest.approx(received_rows(), rel=0.07)
    assert spread < received_rows() / 4


def test_chunks_grow_with_depth_as_in_the_printed_map() -> None:
    chunks = layer_chunks(STATIC_I)
    assert [chunks[layer] for layer in (4, 5, 6, 7)] == [1, 1, 1, 1]
    assert max(chunks.values()) == chunks[15] == 4
    assert set(chunks.values()) == {1, 2, 4}
    halves = [[count for layer, count in chunks.items() if (layer >= 10) == is_deep] for is_deep in (False, True)]
    assert max(halves[0]) <= min(halves[1])


@pytest.mark.parametrize(("alpha", "largest"), [(0.85, 4), (0.86, 4), (0.90, 2), (0.97, 2)])
def test_alpha_decides_how_far_the_map_reaches(alpha: float, largest: int) -> None:
    assert max(layer_chunks(STATIC_I, alpha=alpha).values()) == largest


def test_model_one_needs_alpha_of_two_chunks() -> None:
    def chunks(alpha: float) -> int:
        return chunk_count(received_rows(), max_rows(MODEL, PARALLEL, M_sta=STATIC_I, M_GPU=M_GPU, alpha=alpha))

    assert (chunks(0.857), chunks(0.859), chunks(ALPHA), chunks(1.0)) == (4, 2, 2, 2)


def test_the_printout_holds_the_table_and_the_map() -> None:
    text = render()
    assert "MACT                      2    43.0     11.9  11.90   48.04%   54.9  fits" in text
    assert "alpha 0.86, bins      1    1    1    1    2    2    4    4    4    2    2    4" in text


SIZES = st.integers(1, 300)
ARCHITECTURES = st.builds(
    Architecture, s=SIZES, h=SIZES, a=SIZES, h_d=SIZES, k_a=SIZES, g_e=SIZES, e_n=SIZES, t_k=SIZES
)
PARALLELS = st.builds(Parallel, t=st.integers(1, 8), c=st.integers(1, 4), b=st.integers(1, 4), D_t=st.integers(1, 4))


@given(ARCHITECTURES, PARALLELS, st.integers(1, 10**6))
@example(Architecture(s=222, h=23, a=146, h_d=78, k_a=67, g_e=179, e_n=136, t_k=1), Parallel(t=7, D_t=3), 1)
def test_max_rows_is_the_last_that_fits(model: Architecture, parallel: Parallel, rows: int) -> None:
    limit = activation_bytes(model, parallel, rows) + 10**6
    found = max_rows(model, parallel, M_sta=10**6, M_GPU=limit, alpha=1.0)
    assert found >= rows
    assert (
        activation_bytes(model, parallel, found) + 10**6 <= limit < activation_bytes(model, parallel, found + 1) + 10**6
    )


@given(st.integers(0, 10**7), st.integers(1, 10**6))
def test_equal_shares_of_the_chosen_chunks_fit(received: int, s_max: int) -> None:
    for bins in (None, PAPER_BINS, (1, 3)):
        chunks = chunk_count(received, s_max, bins)
        assert received / chunks <= s_max
        assert bins is None or chunks in bins or chunks % max(bins) == 0


def test_beyond_the_largest_bin_the_bound_still_holds() -> None:
    assert [snap_to_bins(count, PAPER_BINS) for count in (1, 2, 3, 5, 8, 9, 17)] == [1, 2, 4, 8, 8, 16, 24]


def test_activation_sets_follow_the_pipeline_rank() -> None:
    parallel = Parallel(p=4, v=2)
    assert [activation_sets(parallel, rank, recomputes_fully=False) for rank in range(4)] == [11, 9, 7, 5]
    assert activation_sets(parallel, 3, recomputes_fully=True) == 1
    with pytest.raises(ConfigError, match="r_pp=4 is not a rank of a pipeline of p=4"):
        activation_sets(parallel, 4, recomputes_fully=False)


def test_static_bytes_sum_parameters_gradients_and_four_optimizer_tensors() -> None:
    assert static_bytes([10, 5], layers=3, D_para=2, D_grad=4, D_opt=4) == 3 * 15 * 22


def test_more_parallelism_divides_the_activations() -> None:
    whole = activation_bytes(MODEL, Parallel(), 1000)
    assert activation_bytes(MODEL, Parallel(t=2, c=2), 1000) == math.ceil(whole / 4)


def test_what_cannot_fit_at_any_rows_names_the_smallest_memory() -> None:
    with pytest.raises(BudgetInfeasible) as caught:
        max_rows(MODEL, PARALLEL, M_sta=STATIC_I, M_GPU=40 * GB, alpha=1.0)
    assert caught.value.largest_terms[0] == ("static", int(STATIC_I))
    assert max_rows(MODEL, PARALLEL, M_sta=STATIC_I, M_GPU=caught.value.minimum_bytes, alpha=1.0) == 1


@pytest.mark.parametrize("alpha", [0.0, 1.1, -1.0])
def test_alpha_is_a_fraction(alpha: float) -> None:
    with pytest.raises(ConfigError, match="must be a fraction"):
        max_rows(MODEL, PARALLEL, M_sta=0, M_GPU=M_GPU, alpha=alpha)


def test_sizes_are_positive_ints() -> None:
    with pytest.raises(ConfigError, match=r"Parallel\.t=0 must be a positive int"):
        Parallel(t=0)
