"""Prefill in one process, decode in another, whose caches differ in shards, pages, order and precision.

    python examples/disaggregated.py [--model qwen3_moe] [--prompts 3] [--tokens 16] [--bf16]

The decode process prints what it generated next to what one process generates alone: the same tokens in fp32.
Needs transformers.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from memfine_fx.demo.tiny import tiny_causal_lm
from memfine_planner.serving.disaggregated import Layout, decode, generate, prefill


def layouts(bf16: bool) -> tuple[Layout, Layout]:
    """The prefill side keeps 2 shards of small pages; the decode side 1 of large ones, heads first."""
    return Layout(tp=2, block_tokens=16), Layout(1, 128, torch.bfloat16 if bf16 else torch.float32, heads_first=True)


def run(rank: int, options: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = tiny_causal_lm(options.model).eval()
    prompts = [torch.randint(0, 64, (1, 20 + 7 * index)) for index in range(options.prompts)]
    here, there = layouts(options.bf16)
    dist.init_process_group("gloo", f"file://{store}", world_size=2, rank=rank)
    if rank == 0:
        sent = prefill(model, prompts, here, there, peer=1)
        print(f"prefill sent {sent:,} B of cache for {len(prompts)} prompts", flush=True)
    else:
        generated = decode(model, len(prompts), options.tokens, there, here, peer=0)
        alone = [generate(model, prompt, options.tokens) for prompt in prompts]
        for apart, together in zip(generated, alone, strict=True):
            print(f"{'same' if apart == together else 'DIFFERENT'}  {apart}", flush=True)
        assert options.bf16 or generated == alone
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="qwen3_moe")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--bf16", action="store_true", help="the decode side keeps its cache in bfloat16")
    with tempfile.TemporaryDirectory() as folder:
        spawn(run, (parser.parse_args(), f"{folder}/store"), nprocs=2)
