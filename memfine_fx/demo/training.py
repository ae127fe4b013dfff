"""Train the demo's model in one mode: ``python -m memfine_fx.demo.training --mode memfine --json FILE``.

The runner starts one process per mode, so that no mode sees another's caches or memory.

1. Build the model, the same seeded weights in every mode, and compile it as the mode says.
2. Train on the same batches of bytes with AdamW. The first step compiles.
3. Trace two more forward and backward passes, in bytes beyond parameters, gradients and optimizer state.
   The first adds to gradients that exist, zeroed in place, as in gradient accumulation; the second makes
   them, as after ``zero_grad(set_to_none=True)``, and their bytes are taken off its peak.

Standard output carries one JSON object per line and nothing else; the result goes to the file.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from memfine_fx.errors import MissingPackage
from memfine_fx.memory.measure import MemoryTrace, mark, trace_memory

MODES = ("compile", "checkpoint", "memfine")
BACKWARD_BEGINS = "backward begins"
NUM_BYTE_VALUES = 256


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model: `hidden` is H, `width` F (of an expert), `experts` E and `top_k` K elsewhere."""

    layers: int
    hidden: int
    width: int
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    positions: int


def build_causal_lm(sizes: ModelSizes, *, seed: int, dtype: torch.dtype, device: torch.device) -> Any:
    """Return an unmodified Qwen3-MoE in train mode. Equal seeds give equal weights on one kind of device."""
    try:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    except ImportError as error:
        raise MissingPackage("transformers", "hf", "building the Qwen3-MoE model") from error
    # A mapping, not keywords: transformers' annotations leave out what it passes on to its base class.
    options: dict[str, Any] = dict(
        num_hidden_layers=sizes.layers,
        hidden_size=sizes.hidden,
        moe_intermediate_size=sizes.width,
        intermediate_size=sizes.width,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
        norm_topk_prob=True,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        vocab_size=sizes.vocab,
        max_position_embeddings=sizes.positions,
        use_cache=False,
        output_router_logits=False,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        experts_implementation="grouped_mm",
    )
    torch.manual_seed(seed)
    with torch.device(device):
        model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**options))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)  # not model.to: rotary frequencies stay in fp32
    return model.train()


@dataclass(frozen=True)
class DemoSizes:
    """The sizes of the trained model and its batches; ``quick`` sizes only show that everything runs."""

    layers: int = 4
    hidden: int = 512
    width: int = 512
    experts: int = 16
    top_k: int = 4
    heads: int = 8
    batch: int = 2
    sequence: int = 1024

    @property
    def model(self) -> ModelSizes:
        return ModelSizes(
            layers=self.layers,
            hidden=self.hidden,
            width=self.width,
            experts=self.experts,
            top_k=self.top_k,
            heads=self.heads,
            kv_heads=self.heads // 2,
            head_dim=self.hidden // self.heads,
            vocab=NUM_BYTE_VALUES,
            positions=self.sequence,
        )


QUICK_SIZES = DemoSizes(layers=2, hidden=64, width=64, experts=8, top_k=2, heads=4, sequence=128)


@dataclass(frozen=True)
class ModeResult:
    """The result of one mode's run. Times on the trace's clock are microseconds since its first event."""

    mode: str
    losses: tuple[float, ...]
    step_seconds: tuple[float, ...]  # whole steps, optimizer included; the first one compiles
    peak_bytes: int  # beyond parameters, gradients and optimizer state; the curve below
    resting_bytes: int
    times_us: tuple[float, ...]
    live_bytes: tuple[int, ...]
    backward_begins_us: float

    @property
    def median_step_seconds(self) -> float:
        return statistics.median(self.step_seconds[1:] or self.step_seconds)

    @property
    def compile_seconds(self) -> float:
        return max(0.0, self.step_seconds[0] - self.median_step_seconds)

    @classmethod
    def from_json(cls, text: str) -> "ModeResult":
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(text).items()
        }
        return cls(**fields)


def train(mode: str, sizes: DemoSizes, *, steps: int, report: Callable[[dict[str, Any]], None]) -> ModeResult:
    """Train ``steps`` steps in this process and trace one more."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_causal_lm(sizes.model, seed=0, dtype=torch.float32, device=device)
    prepare_model(model, mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    batches = _batches(sizes, steps + 1, device)
    losses: list[float] = []
    seconds: list[float] = []
    for step, tokens in enumerate(batches[:steps], start=1):
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        del loss
        report({"event": "step", "step": step, "loss": losses[-1], "seconds": seconds[-1]})
    optimizer.zero_grad()
    trace = _trace_one_step(model, batches[-1], device)
    report({"event": "traced", "peak_bytes": trace.peak_bytes})
    return ModeResult(
        mode=mode,
        losses=tuple(losses),
        step_seconds=tuple(seconds),
        peak_bytes=trace.peak_bytes,
        resting_bytes=trace.resting_bytes,
        times_us=trace.times_us,
        live_bytes=trace.live_bytes,
        backward_begins_us=dict(trace.marks)[BACKWARD_BEGINS],
    )


def prepare_model(model: Any, mode: str) -> None:
    """Compile a model in place; this is all in which the modes differ."""
    if mode == "memfine":
        import memfine_fx

        # What is drawn leaves gradients out; without a budget more is saved as long as these are the larger part.
        memfine_fx.optimize(model, memory_budget="least")
        return
    if mode == "checkpoint":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.compile()


def _trace_one_step(model: Any, tokens: torch.Tensor, device: torch.device) -> MemoryTrace:
    def step() -> None:
        loss = model(input_ids=tokens, labels=tokens).loss
        mark(BACKWARD_BEGINS)
        loss.backward()

    def gradients() -> list[torch.Tensor]:
        return [weight.grad for weight in model.parameters() if weight.grad is not None]

    return trace_memory(step, device, beyond=gradients)


def _batches(sizes: DemoSizes, count: int, device: torch.device) -> list[torch.Tensor]:
    """Return [batch, sequence] windows of the text's bytes, at seeded places."""
    text = files("memfine_fx.demo").joinpath("text.txt").read_bytes()
    data = torch.tensor(list(text), dtype=torch.long)
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(len(data) - sizes.sequence, (count, sizes.batch), generator=generator).tolist()
    return [torch.stack([data[start : start + sizes.sequence] for start in row]).to(device) for row in starts]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m memfine_fx.demo.training", description=__doc__.split("\n")[0])
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--json", type=Path, required=True, help="where the result goes")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--sizes", default="{}", help="fields of DemoSizes as a JSON object")
    options = parser.parse_args(arguments)
    # Libraries write to file descriptor 1 as they please; give them standard error and keep the real one.
    protocol = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def report(event: dict[str, Any]) -> None:
        print(json.dumps(event), file=protocol, flush=True)

    result = train(options.mode, DemoSizes(**json.loads(options.sizes)), steps=options.steps, report=report)
    options.json.write_text(json.dumps(asdict(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
