"""A strategy as launch flags for Megatron-LM and torchtitan.

Flag names as in Megatron-Core 0.16 (`megatron/training/arguments.py` and the configs it makes flags of) and torchtitan
0.2 (`torchtitan/config/job_config.py`). What a framework has no flag for (chunked experts) is returned as a remark.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfine_planner.costs.architectures import Architecture
from memfine_planner.costs.strategy import Strategy
from memfine_planner.training.stages import stages

__all__ = ["Launch", "megatron", "torchtitan"]

_MEGATRON_FP8 = {"FP8-CS": "tensorwise", "FP8-DS": "delayed", "FP8-SC": "blockwise", "FP8-MX": "mxfp8"}


@dataclass(frozen=True)
class Launch:
    """Flags in order, and what they cannot say."""

    flags: tuple[str, ...]
    remarks: tuple[str, ...]

    def __str__(self) -> str:
        remarks = "".join(f"# {remark}\n" for remark in self.remarks)
        return remarks + " \\\n".join(self.flags)


def megatron(arch: Architecture, s: Strategy) -> Launch:
    """Parallelism, batch, precision, recomputation and overlap flags of pretrain_gpt.py."""
    flags = [
        f"--tensor-model-parallel-size {s.tp}",
        f"--pipeline-model-parallel-size {s.pp}",
        f"--context-parallel-size {s.cp}",
        f"--micro-batch-size {s.micro_batch}",
        f"--global-batch-size {s.global_batch}",
        f"--seq-length {s.seq}",
        "--fp16" if s.precision == "FP16" else "--bf16",
    ]
    remarks: list[str] = []
    if s.is_sequence_parallel:
        flags.append("--sequence-parallel")
    flags += _megatron_stages(arch, s)
    if arch.is_moe:
        flags += [f"--expert-model-parallel-size {s.ep}", "--expert-tensor-parallel-size 1", "--moe-grouped-gemm"]
        if s.dispatcher == "hierarchical":
            flags += ["--moe-token-dispatcher-type flex", "--moe-flex-dispatcher-backend hybridep"]
        else:
            flags.append("--moe-token-dispatcher-type alltoall")
        if s.overlap_ep:
            flags += ["--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute"]
    flags += _megatron_data_parallel(s)
    if s.precision in _MEGATRON_FP8:
        flags += ["--fp8-format hybrid" if s.precision != "FP8-MX" else "--fp8-format e4m3"]
        flags.append(f"--fp8-recipe {_MEGATRON_FP8[s.precision]}")
    elif s.precision == "NVFP4":
        flags += ["--fp4-format e2m1", "--fp4-recipe nvfp4"]
    if s.overlap_tp and s.tp > 1:
        flags.append("--tp-comm-overlap")
    flags += _megatron_recompute(arch, s)
    if s.cuda_graphs == "full":
        flags += ["--cuda-graph-impl local", "--cuda-graph-scope full_iteration"]
    elif s.cuda_graphs == "partial":
        scope = "attn moe_router moe_preprocess" if arch.is_moe else "attn mlp"
        flags += ["--cuda-graph-impl transformer_engine", f"--cuda-graph-scope {scope}"]
    if s.offload_layers:
        remarks.append(f"activations of {s.offload_layers} layers offloaded: TransformerConfig.cpu_offloading, no flag")
    return Launch(tuple(flags), (*remarks, *_chunk_remarks(s)))


def _megatron_stages(arch: Architecture, s: Strategy) -> list[str]:
    """How layers are dealt to stages: evenly, with embedding and head counted as layers, or as a layout."""
    chunks = s.pp * s.vp
    interleaved = [f"--num-virtual-stages-per-pipeline-rank {s.vp}"] if s.vp > 1 else []
    if arch.layers % chunks == 0:
        return interleaved
    if (arch.layers + 2) % chunks == 0:
        return [*interleaved, "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"]
    return [f'--pipeline-model-parallel-layout "{pipeline_layout(arch, s)}"']


def pipeline_layout(arch: Architecture, s: Strategy) -> str:
    """Megatron's layout: E embedding, t a layer, L loss, | between stages, in the order that a token meets them."""
    held = stages(arch, s.pp, s.vp)
    layers = [len(held[rank].chunks[chunk]) for chunk in range(s.vp) for rank in range(s.pp)]
    shown = ["" if count == 0 else "t" if count == 1 else f"t*{count}" for count in layers]
    shown[0], shown[-1] = f"E{shown[0]}", f"{shown[-1]}L"
    return "|".join(shown)


def _megatron_data_parallel(s: Strategy) -> list[str]:
    flags = []
    if s.zero >= 2:
        sharded = "optim_grads_params" if s.zero == 3 else "optim_grads"
        flags += ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {sharded}", "--ckpt-format fsdp_dtensor"]
    if s.zero >= 1:
        flags.append("--use-distributed-optimizer")
    if s.overlap_dp:
        flags += ["--overlap-grad-reduce"] + (["--overlap-param-gather"] if s.zero >= 1 else [])
    if s.grad_bytes == 2:
        flags.append("--grad-reduce-in-bf16")
    return flags


def _megatron_recompute(arch: Architecture, s: Strategy) -> list[str]:
    if s.recompute == "none":
        return []
    if s.recompute == "full":
        if s.recompute_layers is None:
            return ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
        per_chunk = -(-s.recompute_layers // (s.pp * s.vp))
        return ["--recompute-granularity full", "--recompute-method block", f"--recompute-num-layers {per_chunk}"]
    if s.recompute == "experts":
        modules = ["moe"]
    elif s.attention == "unfused":
        modules = ["core_attn"]
    else:
        modules = ["layernorm", *(["moe_act"] if arch.is_moe else []), *(["mla_up_proj"] if arch.latent else [])]
    return ["--recompute-granularity selective", f"--recompute-modules {' '.join(modules)}"]


def torchtitan(arch: Architecture, s: Strategy) -> Launch:
    """Parallelism, batch, recomputation and float8 options of torchtitan's train.py."""
    shards = s.zero == 3
    per_step = s.global_batch // s.dp
    flags = [
        f"--parallelism.tensor_parallel_degree={s.tp}",
        f"--parallelism.pipeline_parallel_degree={s.pp}",
        f"--parallelism.context_parallel_degree={s.cp}",
        f"--parallelism.data_parallel_shard_degree={s.dp if shards or s.zero else 1}",
        f"--parallelism.data_parallel_replicate_degree={1 if shards or s.zero else s.dp}",
        f"--training.local_batch_size={per_step if s.pp > 1 else s.micro_batch}",
        f"--training.global_batch_size={s.global_batch}",
        f"--training.seq_len={s.seq}",
    ]
    remarks: list[str] = []
    if s.zero in (1, 2):
        remarks.append("torchtitan shards weights wherever it shards optimizer state (FSDP2), this plan gathers none")
    if s.pp > 1:
        schedule = "Interleaved1F1B" if s.vp > 1 else "1F1B"
        flags += [
            f"--parallelism.pipeline_parallel_schedule={schedule}",
            f"--parallelism.pipeline_parallel_microbatch_size={s.micro_batch}",
        ]
    if s.vp > 2:
        each = -(-(arch.layers + 2) // (s.pp * s.vp))
        flags.append(f"--parallelism.pipeline_parallel_layers_per_stage={each}")
        if -(-(arch.layers + 2) // each) != s.pp * s.vp:
            remarks.append(f"no even split into {s.pp * s.vp} stages: name them in module_fqns_per_model_part")
    if arch.is_moe:
        flags += [f"--parallelism.expert_parallel_degree={s.ep}", "--parallelism.expert_tensor_parallel_degree=1"]
    mode = {"none": "none", "selective": "selective", "full": "full", "experts": "none"}[s.recompute]
    flags.append(f"--activation_checkpoint.mode={mode}")
    if mode == "selective":
        flags.append("--activation_checkpoint.selective_ac_option=op")
    if s.numbers.matmul == "FP8":
        converter = "quantize.linear.mx" if s.precision == "FP8-MX" else "quantize.linear.float8"
        flags.append(f'--model.converters="{converter}"')
    return Launch(tuple(flags), (*remarks, *_chunk_remarks(s)))


def _chunk_remarks(s: Strategy) -> list[str]:
    if s.chunks > 1:
        return [f"experts in {s.chunks} token chunks, recomputed: memfine_fx.optimize(model) with axis='tokens'"]
    if s.rows_per_round:
        return [
            f"experts in rounds of at most {s.rows_per_round} received rows, recomputed: memfine_fx.optimize(model)"
        ]
    if s.recompute == "experts":
        return ["experts recomputed: memfine_fx.optimize(model)"]
    return []
