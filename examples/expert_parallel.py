"""Train a small Qwen3-MoE whose experts are shared by all ranks; rows travel to them in rounds of bounded size.

    torchrun --nproc-per-node 2 examples/expert_parallel.py
    torchrun --nproc-per-node 8 examples/expert_parallel.py --device cuda --slots 2

On CPU over gloo; with a GPU per process over NCCL, which has not been run. DistributedDataParallel averages what is not
sharded, a checkpoint is written and read back at the end, and rank 0 exports the whole model under its original keys.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import memfine_fx
from memfine_fx.expert_parallel.groups import expert_group
from memfine_fx.expert_parallel.state import TrainingState, whole_state_dict


def tiny_model() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)  # every rank begins with the same whole model
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
    )
    return Qwen3MoeForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rows", type=int, default=64, help="most rows that a rank receives at once")
    parser.add_argument(
        "--slots", type=int, help="room on every rank for clones of hot experts (default: by the budget)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is one")
    parser.add_argument("--replicas", type=int, default=1, help="data-parallel replicas of the experts")
    parser.add_argument("--inner", default="inductor", choices=("inductor", "aot_eager", "eager"))
    options = parser.parse_args()

    is_on_gpu = torch.cuda.is_available() if options.device is None else options.device == "cuda"
    local_rank = int(os.environ["LOCAL_RANK"])
    if is_on_gpu and local_rank >= torch.cuda.device_count():
        parser.error(f"process {local_rank} has no GPU: torch sees {torch.cuda.device_count()}; start fewer processes")
    device = torch.device("cuda", local_rank) if is_on_gpu else torch.device("cpu")
    if is_on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    shape = (options.replicas, num_ranks // options.replicas)
    mesh = dist.device_mesh.init_device_mesh(device.type, shape, mesh_dim_names=("replicas", "experts"))

    model = tiny_model().to(device)
    config = memfine_fx.Config(rows_per_chunk=options.rows, inner_backend=options.inner)
    memfine_fx.optimize(model, expert_parallel=expert_group(mesh, slots=options.slots), config=config)
    trained = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    torch.manual_seed(1 + rank)  # and with tokens of its own
    for step in range(options.steps):
        start = torch.randint(0, 256, (4, 1), device=device)
        ids = (start + torch.arange(64, device=device)) % 256
        loss = trained(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step}: loss {float(mean) / num_ranks:.4f}", flush=True)

    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    state = {"training": TrainingState(model, optimizer)}
    dcp.save(state, checkpoint_id=folder[0])
    dcp.load(state, checkpoint_id=folder[0])  # any number of ranks may do this
    whole = whole_state_dict(model)
    if rank == 0:
        tiny_model().load_state_dict(whole)
        print(f"checkpoint in {folder[0]}; exported {len(whole)} tensors that load into the unsharded model")
        print(memfine_fx.report(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
