"""Rules of strategies, stages and launch flags."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfine_fx.errors import ConfigError
from memfine_planner.costs.model_configs import architecture
from memfine_planner.costs.strategy import Strategy, StrategyError, check, with_fields
from memfine_planner.hardware.systems import system
from memfine_planner.training.launch import megatron, pipeline_layout, torchtitan
from memfine_planner.training.runs import preset
from memfine_planner.training.stages import stages

MOE = architecture("deepseek_v3")
GOOD = Strategy(gpus=256, pp=4, vp=4, ep=64, global_batch=4096)


def test_published_strategy_keeps_the_rules() -> None:
    check(MOE, system("GB200"), GOOD)


@pytest.mark.parametrize(
    ("changes", "rule", "nearest"),
    [
        ({"tp": 3}, "tp=3 does not divide the attention heads", "tp=2"),
        ({"gpus": 250}, "does not divide gpus=250", "gpus=248"),
        ({"pp": 7}, "tp*pp*cp=1*7*1=7 does not divide gpus=256", "pp=8, or gpus=259"),
        ({"dispatcher": "magic"}, "dispatcher='magic' is none of alltoall, hierarchical", "dispatcher="),
        ({"ep": 100}, "ep=100 does not divide the number of experts", "ep=128"),
        ({"ep": 512}, "ep=512 does not divide the number of experts", "ep=256"),
        ({"pp": 8, "ep": 64}, "ep=64 does not divide the 32 GPUs of a pipeline stage", "ep=32"),
        ({"global_batch": 100}, "does not divide global_batch=100", "global_batch=128"),
        ({"global_batch": 4096 + 64 * 2}, "in groups of pp=4, which does not divide their number (66)", "=4096"),
        ({"vp": 4, "pp": 1}, "interleaves a pipeline, but pp=1", "vp=1"),
        ({"pp": 32, "vp": 8, "ep": 8}, "more stages than the 61 layers", "vp=1"),
        ({"precision": "NVFP4"}, "H100 has no FP4 units", "FP8-MX"),
        ({"precision": "INT1"}, "unknown precision 'INT1'", "BF16"),
        ({"chunks": 4}, "save nothing without recomputing", "recompute=experts"),
        ({"chunks": 4, "rows_per_round": 9, "recompute": "experts"}, "two ways to bound", "chunks=1"),
        ({"zero": 7}, "zero=7 is no ZeRO stage", "zero=1"),
        ({"micro_batch": 0}, "micro_batch=0 must be a positive integer", "micro_batch=1"),
        ({"offload_layers": 99}, "offload_layers=99 of 61 layers", "offload_layers=61"),
    ],
)
def test_broken_rule_is_named_with_the_nearest_valid_choice(
    changes: dict[str, object], rule: str, nearest: str
) -> None:
    with pytest.raises(StrategyError) as caught:
        check(MOE, system("H100"), with_fields(GOOD, **changes))
    assert rule in caught.value.rule
    assert nearest in caught.value.nearest


def test_dense_model_takes_no_expert_parallelism() -> None:
    with pytest.raises(StrategyError, match="has no experts; nearest valid: ep=1"):
        check(architecture("llama3_8b"), system("H100"), Strategy(gpus=8, ep=8, global_batch=8))


def test_unknown_field_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown strategy field tensor; known: .*\btp\b"):
        with_fields(GOOD, tensor=2)


@given(
    pp=st.integers(1, 16), vp=st.integers(1, 6), name=st.sampled_from(["llama3_70b", "deepseek_v3", "qwen3_235b_a22b"])
)
def test_every_layer_lies_on_one_stage(pp: int, vp: int, name: str) -> None:
    arch = architecture(name)
    held = stages(arch, pp, vp)
    in_order = sorted((i * pp + s.rank, layer) for s in held for i, chunk in enumerate(s.chunks) for layer in chunk)
    assert [layer for _, layer in in_order] == list(range(arch.layers))
    assert held[0].has_embedding and held[-1].has_head


def test_embedding_and_head_count_as_layers_where_that_divides() -> None:
    held = stages(architecture("qwen3_235b_a22b"), 8, 3)
    assert [stage.num_layers for stage in held] == [11, *[12] * 6, 11]


def test_megatron_flags_say_the_strategy() -> None:
    s = replace(GOOD, tp=2, ep=32, precision="FP8-MX", recompute="full", chunks=2, gpus=512)
    launch = megatron(MOE, s)
    for flag in (
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 4",
        "--expert-model-parallel-size 32",
        "--sequence-parallel",
        "--fp8-recipe mxfp8",
        "--recompute-granularity full",
        "--use-distributed-optimizer",
    ):
        assert flag in launch.flags
    assert any("2 token chunks" in remark for remark in launch.remarks)
    even = Strategy(gpus=64, tp=4, pp=8, vp=5, global_batch=128, seq=8192)
    assert "--num-virtual-stages-per-pipeline-rank 5" in megatron(architecture("llama3_70b"), even).flags


def test_torchtitan_flags_multiply_to_all_gpus() -> None:
    flags = dict(flag[2:].split("=") for flag in torchtitan(MOE, replace(GOOD, zero=3, pp=2, vp=1)).flags)
    degrees = ("tensor", "pipeline", "context", "data_parallel_shard", "data_parallel_replicate")
    names = [
        f"parallelism.{name}_degree" if "data" in name else f"parallelism.{name}_parallel_degree" for name in degrees
    ]
    product = 1
    for name in names:
        product *= int(flags[name])
    assert product == 256


def test_megatron_layout_deals_the_layers_that_do_not_divide() -> None:
    s = replace(GOOD, pp=16, vp=2, ep=16)
    layout = pipeline_layout(MOE, s)
    stages_of_layout = layout.split("|")
    assert len(stages_of_layout) == 32
    assert stages_of_layout[0].startswith("E") and stages_of_layout[-1].endswith("L")
    counts = [part.strip("EL") for part in stages_of_layout]
    assert sum(int(part[2:]) if "*" in part else len(part) for part in counts) == MOE.layers
    flags = megatron(MOE, s).flags
    assert f'--pipeline-model-parallel-layout "{layout}"' in flags
    assert not any("virtual-stages" in flag for flag in flags)


@pytest.mark.parametrize("recompute", ["full", "experts"])
def test_overlap_that_recomputation_excludes_is_not_preset(recompute: str) -> None:
    options = preset(MOE, system("H100"), 4, recompute)
    flags = megatron(MOE, with_fields(GOOD, recompute=recompute, **options)).flags
    assert not any("overlap-moe" in flag or "delay-wgrad" in flag for flag in flags)
    assert preset(MOE, system("H100"), 4, "selective")["overlap_ep"]


MEGATRON_OPTIONS = frozenset(
    """tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size micro-batch-size global-batch-size
    seq-length fp16 bf16 sequence-parallel num-virtual-stages-per-pipeline-rank account-for-embedding-in-pipeline-split
    account-for-loss-in-pipeline-split pipeline-model-parallel-layout expert-model-parallel-size
    expert-tensor-parallel-size moe-grouped-gemm moe-token-dispatcher-type moe-flex-dispatcher-backend
    overlap-moe-expert-parallel-comm delay-wgrad-compute use-megatron-fsdp data-parallel-sharding-strategy ckpt-format
    use-distributed-optimizer overlap-grad-reduce overlap-param-gather grad-reduce-in-bf16 fp8-format fp8-recipe
    fp4-format fp4-recipe tp-comm-overlap recompute-granularity recompute-method recompute-num-layers recompute-modules
    cuda-graph-impl cuda-graph-scope""".split()
)
"""Read from Megatron-Core 0.16: arguments.py and the dataclasses that it makes options of."""


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("recompute", ["none", "selective", "full", "experts"])
@pytest.mark.parametrize("precision", ["BF16", "FP8-MX", "NVFP4"])
def test_every_megatron_flag_is_an_option_of_megatron(zero: int, recompute: str, precision: str) -> None:
    sys = system("GB200")
    for vp, graphs in ((1, "full"), (2, "partial")):
        s = with_fields(GOOD, zero=zero, vp=vp, precision=precision, **preset(MOE, sys, vp, recompute))
        flags = megatron(MOE, with_fields(s, recompute=recompute, cuda_graphs=graphs, tp=2)).flags
        assert {flag[2:].split()[0] for flag in flags} <= MEGATRON_OPTIONS
