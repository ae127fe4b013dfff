"""How far is what `fit` says of a config from what a real step takes? `python -m benchmarks.fit_accuracy`.

For each family and setup of `SETUPS`, on this machine's CPU:

1. `fit` answers from the config alone;
2. the model is made and optimized, and steps until everything is compiled and the optimizer holds its state;
3. one more step is run under the allocator's own events: the peak is what was there before it (parameters, buffers,
   inputs, optimizer state) and the most live bytes within it.

All tokens are alike, so each of K experts gets a row of every token, as `fit` supposes. A family runs in a process of
its own; rows that FILE has already are not run again. Rows "as torch.compile takes it" compare what is said of the step
without memfine_fx, which is read from its graphs, with a step of torch.compile; they count for themselves.

`--held` runs `HELD_SETUPS` instead, of `HELD_FAMILIES` too: one sequence, odd lengths and micro-batches, which no
formula was fitted to. A setup under the smallest budget fails there if the real run refuses that budget.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

import memfine_fx
from benchmarks.machine import describe_machine
from memfine_fx.config import Config
from memfine_fx.errors import MemfineError
from memfine_fx.fitting.analysis import Analysis
from memfine_fx.fitting.answer import analyse, analysed_plainly
from memfine_fx.fitting.models import held_tensors, real_model
from memfine_fx.fitting.setup import Setup
from memfine_fx.memory.measure import trace_memory

__all__ = ["FAMILIES", "HELD_FAMILIES", "HELD_SETUPS", "SETUPS", "Combination", "config_of", "main", "summary"]

RESULTS = Path(__file__).parent / "results" / "fit_accuracy.jsonl"
WITHIN, UNDER = 0.02, 0.01
"""What is aimed at: at most so far from the measured peak, and at most so far under it."""
_PLAIN = "as torch.compile takes it"
_WARM_STEPS = 2  # the second is the first with state of the optimizer, and may be compiled anew under a budget

_SIZES: dict[str, Any] = dict(
    hidden_size=256,
    intermediate_size=512,
    moe_intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=2048,
    num_experts=8,
    num_local_experts=8,
    n_routed_experts=8,
    num_experts_per_tok=2,
    max_position_embeddings=2048,
    pad_token_id=0,
    use_cache=False,
)
_LATENT: dict[str, Any] = dict(
    q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=64, num_key_value_heads=4
)
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "qwen2_moe": dict(shared_expert_intermediate_size=256),
    "mixtral": dict(intermediate_size=256),
    "olmoe": dict(intermediate_size=256),
    "deepseek_v3": dict(_LATENT, n_group=2, topk_group=1, first_k_dense_replace=1, head_dim=32),
    "deepseek_v2": dict(_LATENT, n_group=2, topk_group=1, first_k_dense_replace=1, head_dim=32),
    "gpt_oss": dict(intermediate_size=256, sliding_window=128, layer_types=["sliding_attention", "full_attention"]),
    "phimoe": dict(intermediate_size=256),
    "granitemoe": dict(intermediate_size=256),
    "glm4_moe": dict(n_group=1, topk_group=1, first_k_dense_replace=1, n_shared_experts=1),
    "dots1": dict(n_group=1, topk_group=1, first_k_dense_replace=1, n_shared_experts=1),
    "ernie4_5_moe": dict(moe_num_experts=8, moe_k=2, moe_layer_start_index=1, moe_num_shared_experts=1),
    "flex_olmo": dict(intermediate_size=256),
}
"""Causal language models of transformers -> fields beside the common ones."""
HELD_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": dict(
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        shared_expert_intermediate_size=256,
        layer_types=["linear_attention", "full_attention"],
    ),
    "lfm2_moe": dict(num_dense_layers=1, layer_types=["conv", "full_attention"]),
    "minimax_m2": {},
}
"""The same for families that only `--held` runs."""


@dataclass(frozen=True)
class Combination:
    """A setup, and which of the two budgets that `fit` names it is under; "" for none.

    Args:
        is_plain: whether torch.compile takes the step, without memfine_fx.
    """

    setup: Setup
    budget: Literal["", "least", "most"] = ""
    is_plain: bool = False

    @property
    def name(self) -> str:
        """Such as "lora bf16 2x256 checkpointing least budget"."""
        one = self.setup
        words = [one.train, one.dtype, f"{one.batch}x{one.seq}"]
        words += ["checkpointing"] * one.checkpointing + [f"{one.accumulate} micro-batches"] * (one.accumulate > 1)
        words += [f"{self.budget} budget"] * bool(self.budget)
        return " ".join([*words, *[_PLAIN] * self.is_plain])


SETUPS = (
    Combination(Setup(2, 256, dtype="fp32")),
    Combination(Setup(2, 256, dtype="bf16")),
    Combination(Setup(2, 256, train="lora", dtype="bf16")),
    Combination(Setup(1, 768, dtype="fp32", checkpointing=True)),
    Combination(Setup(2, 384, dtype="bf16"), "most"),
    Combination(Setup(2, 384, dtype="fp32"), "least"),
    Combination(Setup(1, 768, train="lora", dtype="fp32", checkpointing=True)),
    Combination(Setup(2, 256, train="qlora", dtype="bf16")),
    Combination(Setup(2, 512, train="qlora", dtype="bf16")),
    Combination(Setup(2, 512, dtype="bf16", checkpointing=True), is_plain=True),
    Combination(Setup(2, 512, train="lora", dtype="bf16", checkpointing=True), is_plain=True),
)
HELD_SETUPS = (
    Combination(Setup(1, 1501, dtype="fp32"), "least"),
    Combination(Setup(1, 777, train="lora", dtype="fp32")),
    Combination(Setup(1, 333, dtype="fp32", checkpointing=True), "most"),
    Combination(Setup(1, 601, dtype="fp32", accumulate=2), "least"),
    Combination(Setup(1, 501, dtype="bf16"), "least"),
    Combination(Setup(1, 777, train="lora", dtype="bf16"), "least"),
    Combination(Setup(2, 513, train="qlora", dtype="bf16")),
    Combination(Setup(2, 257, train="lora", dtype="bf16", accumulate=3)),
)
_ALL_FAMILIES, _ALL_SETUPS = {**FAMILIES, **HELD_FAMILIES}, (*SETUPS, *HELD_SETUPS)


def config_of(family: str) -> Any:
    from transformers import CONFIG_MAPPING

    known: Any = CONFIG_MAPPING
    return known[family](**{**_SIZES, **_ALL_FAMILIES[family]})


def compared(family: str, combination: Combination) -> dict[str, Any]:
    """One row: what was said, what was measured."""
    config, setup = config_of(family), combination.setup
    started = time.process_time()
    if combination.budget:
        plan = combination.budget
        budget = _fitted(config, setup, (plan,)).total(plan, setup.batch, setup.seq).num_bytes
        setup = replace(setup, budget=budget)
    if combination.is_plain:
        torch._dynamo.reset()
        analysis = analysed_plainly(config, setup, Config())
    else:
        analysis = _fitted(config, setup, ("least",) if combination.budget else ())
    seconds = time.process_time() - started
    asked = analysis.peak_as_asked(setup.batch, setup.seq)
    said, measured = asked.num_bytes, measured_peak(config, setup, combination.is_plain)
    return {
        "family": family,
        "setup": combination.name,
        "budget_bytes": setup.budget,
        "said_bytes": said,
        "measured_bytes": measured,
        "ratio": round(said / measured, 5),
        "where": asked.where,
        "terms": dict(asked.terms),
        "chunked": len(analysis.records[0].chunked),
        "fit_cpu_seconds": round(seconds, 1),
    }


def _fitted(config: Any, setup: Setup, plans: tuple[str, ...]) -> Analysis:
    torch._dynamo.reset()  # no compilation knows of an earlier one
    return analyse(config, setup, Config(memory_budget=setup.budget), plans=plans, is_for_own_batch=True)[0]


def measured_peak(config: Any, setup: Setup, is_plain: bool = False) -> int:
    """Bytes at the peak of a real step, by the allocator's events; `is_plain`: of torch.compile without memfine_fx."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = real_model(config, setup)
    if is_plain:
        model.compile(dynamic=True)
    else:
        memfine_fx.optimize(model, dynamic=True, memory_budget=setup.budget)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0)
    tokens = torch.full((setup.batch, setup.seq), 7)
    labels = tokens.clone()

    def step() -> None:
        for _ in range(setup.accumulate):
            model(input_ids=tokens, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(_WARM_STEPS):
        step()
    there = [*held_tensors(model), *model.buffers(), tokens, labels]
    there += [one for state in optimizer.state.values() for one in state.values()]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in there}
    return sum(storages.values()) + trace_memory(step, torch.device("cpu")).peak_bytes


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """How many rows, and how far off; those without memfine_fx on a line of their own."""
    theirs = [row for row in rows if row["setup"].endswith(_PLAIN)]
    ours = [row for row in rows if row not in theirs]
    return _summary(ours) + (f"\n{_PLAIN}: {_summary(theirs)}" if theirs else "")


def _summary(rows: Sequence[dict[str, Any]]) -> str:
    ratios = sorted(row["ratio"] for row in rows if "ratio" in row)
    if not ratios:
        return "no rows"
    near = sum(abs(one - 1) <= WITHIN for one in ratios)
    under = sum(one < 1 - UNDER for one in ratios)
    return (
        f"{len(ratios)} compared, {near} within {WITHIN:.0%}, {under} more than {UNDER:.0%} under; "
        f"ratio {ratios[0]:.4f} to {ratios[-1]:.4f}, median {ratios[len(ratios) // 2]:.4f}; "
        f"{sum('error' in row for row in rows)} failed"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Status 1 where a combination failed."""
    options = _parser().parse_args(arguments)
    if options.one:
        for row in _rows_of(
            options.one, [one for one in _ALL_SETUPS if one.name in options.setups], _known(options.out)
        ):
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        return 0
    families = options.families or (_ALL_FAMILIES if options.held else FAMILIES)
    setups = options.setups or [one.name for one in (HELD_SETUPS if options.held else SETUPS)]
    for family in families:
        command = [sys.executable, "-m", "benchmarks.fit_accuracy", "--one", family, "--out", str(options.out)]
        subprocess.run([*command, "--setups", *setups], check=False)
    rows = _read(options.out)
    for row in sorted(rows, key=lambda one: abs(one.get("ratio", 9) - 1)):
        print(f"{row['family']:14} {row['setup']:40} {row.get('ratio', row.get('error'))}")
    print(summary(rows))
    return int(any("error" in row for row in rows))


def _rows_of(family: str, combinations: Sequence[Combination], known: set[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    machine = str(describe_machine(torch.device("cpu")))
    for combination in combinations:
        if (family, combination.name) in known:
            continue
        try:
            row = compared(family, combination)
        except (MemfineError, RuntimeError, ValueError) as error:  # the matrix goes on, the row says why
            row = {"family": family, "setup": combination.name, "error": f"{type(error).__name__}: {error}"[:400]}
        yield {**row, "machine": machine}


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _known(path: Path) -> set[tuple[str, str]]:
    return {(row["family"], row["setup"]) for row in _read(path)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit_accuracy", description=__doc__)
    names = [one.name for one in _ALL_SETUPS]
    parser.add_argument("--held", action="store_true", help="run HELD_SETUPS, of HELD_FAMILIES too")
    parser.add_argument("--families", nargs="+", choices=_ALL_FAMILIES, help="instead of all")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"default {RESULTS.name}; its rows are kept")
    parser.add_argument("--setups", nargs="+", choices=names, help="of each family, instead of all")
    parser.add_argument("--one", choices=_ALL_FAMILIES, help="this family, in this process")
    return parser


if __name__ == "__main__":
    sys.exit(main())
