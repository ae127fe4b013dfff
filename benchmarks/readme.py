"""The tables of README and docs/benchmarks.md, from the committed rows, so that no figure in it is typed by hand.

A block starts with ``<!-- benchmarks: NAME -->`` and ends with ``<!-- /benchmarks -->``; what stands between is
written by ``python -m benchmarks readme`` and compared by ``python -m benchmarks readme --check``.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.expert_parallel import Findings
from benchmarks.harness import read_rows
from benchmarks.records import Row
from benchmarks.suites import SUITES
from benchmarks.suites.ep import describe, describe_paper
from benchmarks.summaries import MIB, Summary, markdown, summaries_of
from benchmarks.tables import conclusions, fraction_of_matmul_rate, machine_lines

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/benchmarks.md", "docs/expert_parallel.md")
RESULTS = ROOT / "benchmarks" / "results"
_BLOCK = re.compile(r"(<!-- benchmarks: (\w+) -->\n).*?(<!-- /benchmarks -->)", re.DOTALL)
_LABELS = {
    "compile": "torch.compile",
    "compile+checkpoint": "torch.compile + checkpoint",
    "eager+checkpoint": "eager + checkpoint",
    "diy": "by hand: `checkpoint` per `x.chunk`, 2048 rows",
    "diy+compile": "the same, compiled",
    "deepspeed-tiled": "DeepSpeed TiledMLP around the block",
    "liger-tiled": "Liger tiled MLP around the block",
    "batched_mm": "transformers `batched_mm`",
    "memfine": "**memfine**",
    "memfine-least": '**memfine, `memory_budget="least"`**',
    "memfine-unlimited": "**memfine, unlimited budget**",
    "memfine-tokens": "memfine, tokens axis (the paper's FCDA)",
    "memfine+checkpoint": "**memfine + gradient checkpointing**",
    "memfine+head": "**memfine, logits given up**",
    "memfine+checkpoint+head": "**memfine + gradient checkpointing, logits given up**",
}
# What users choose among, and which rows have it.
_TECHNIQUES = {
    "model_cpu.jsonl": ("compile+checkpoint", "memfine", "memfine-least"),
    "vocab_cpu.jsonl": ("memfine+head", "memfine+checkpoint+head"),
    "adapters_cpu.jsonl": ("eager+checkpoint", "memfine"),
}
_TECHNIQUE_MODELS = {
    "model_cpu.jsonl": "Qwen3-MoE model",
    "vocab_cpu.jsonl": "the same with a large vocabulary",
    "adapters_cpu.jsonl": "one layer, PEFT's LoRA on frozen experts",
}
_TECHNIQUE_LABELS = {
    "memfine-least": '**memfine**, `memory_budget="least"`',
    "memfine+head": "**memfine**, `returns_logits=False`",
    "memfine+checkpoint+head": "**memfine**, `returns_logits=False`, gradient checkpointing",
}
_ADAPTED, _ADAPTED_EXPERTS = "lora", 64


def write_readme(path: Path) -> bool:
    """Fill the blocks; whether anything changed."""
    before = path.read_text()
    after = filled(before)
    if after != before:
        path.write_text(after)
    return after != before


def filled(text: str) -> str:
    """The text with every block as the committed rows have it.

    Raises:
        KeyError: a block's name is unknown.
    """
    return _BLOCK.sub(lambda block: f"{block[1]}{BLOCKS[block[2]]()}\n{block[3]}", text)


def label_of(peer: str) -> str:
    if peer.startswith("compile-budget"):
        return f"torch.compile, `activation_memory_budget` {peer.removeprefix('compile-budget')}"
    if peer.startswith("memfine-R"):
        return f"memfine, {peer.removeprefix('memfine-R')} rows a chunk"
    if peer.startswith("memfine-") and peer.endswith("B"):
        return f'**memfine, `memory_budget="{peer.removeprefix("memfine-")}"`**'
    return _LABELS.get(peer, peer)


def layer_block(rows: Sequence[Row]) -> str:
    """One line a peer, fp32 and bf16 beside each other; of all peers, also those without figures."""
    found = {(one.job.peer, one.job.dtype): one for one in summaries_of(rows)}
    lines = []
    for peer in dict.fromkeys(peer for peer, _ in found):
        full, half = found.get((peer, "float32")), found.get((peer, "bfloat16"))
        rate = f"{fraction_of_matmul_rate(full):.0%}" if full else "-"
        lines.append([label_of(peer), _peak(full), _time(full), rate, _peak(half), _time(half)])
    table = markdown(" | fp32 peak MiB | fp32 s | of matmul rate | bf16 peak MiB | bf16 s", lines)
    return "\n".join([*_heading(rows), table, *_without_figures(rows)])


def model_block(rows: Sequence[Row]) -> str:
    """One line a peer of the suite's first table, with compile time and recompilations."""
    rows = [row for row in rows if row.job.workload == "model"]
    summaries = summaries_of(rows)
    lines = []
    for one in summaries:
        again = "-" if one.last.recompilations is None else str(one.last.recompilations)
        cold = "-" if one.cold_compile_seconds is None or again == "-" else f"{one.cold_compile_seconds:.1f}"
        lines.append([label_of(one.job.peer), _peak(one), _whole(one), _time(one), cold, again])
    header = " | peak MiB | with gradients | step s | cold compile s | recompiled in 5 further shapes"
    table = markdown(header, lines)
    return "\n".join([*_heading(rows), table, *_without_figures(rows), "", _model_ratios(summaries)])


def architectures_block(rows: Sequence[Row]) -> str:
    """A line for each further architecture and peer, beside torch.compile."""
    rows = [row for row in rows if row.job.kind == "model" != row.job.workload]
    found = {(one.job.workload, one.job.peer): one for one in summaries_of(rows)}
    lines = []
    for (workload, peer), one in found.items():
        plain = found[workload, "compile"]
        ratios = [one.peak_bytes / plain.peak_bytes, one.step_seconds / plain.step_seconds]
        peak, seconds = (f"{ratio:.2f} x" for ratio in ratios)
        name = workload.partition(":")[2]
        lines.append([name, label_of(peer), _peak(one), peak, _whole(one), _time(one), seconds])
    header = " | | peak MiB | of torch.compile | with gradients | step s | of torch.compile"
    return "\n".join([*_heading(rows), markdown(header, lines), *_without_figures(rows)])


def adapters_block(rows: Sequence[Row]) -> str:
    """A line for each format and number of experts: bytes beside frozen experts and peers, and times of timed rows."""
    ordered = sorted(summaries_of(rows), key=lambda one: (one.job.sizes.experts, one.job.steps))  # the best timed last
    found = {(one.job.workload, one.job.sizes.experts, one.job.peer): one for one in ordered}
    lines = []
    for (workload, experts, peer), one in found.items():
        if peer != "memfine":
            continue
        table_bytes = 4 * experts * 2 * one.job.sizes.width * one.job.sizes.hidden
        peers = [found.get((workload, experts, name)) for name in _BESIDE_ADAPTERS]
        against = [
            f"{one.peak_bytes / other.peak_bytes:.3f}" if other else "-"
            for other in (found.get(("frozen", experts, peer)), *peers)
        ]
        largest = f"{(one.last.largest_bytes or 0) / table_bytes:.3f}"
        timed = [other if _are_timed(one, other) else None for other in peers[:2]]
        times = [f"{one.step_seconds / other.step_seconds:.2f}" if other else "-" for other in timed]
        lines.append([workload, str(experts), f"{one.peak_bytes / MIB:.1f}", *against, largest, *times])
    header = (
        "experts are | E | peak MiB | of frozen experts' | of eager's | of torch.compile's | of eager+checkpoint's "
        "| largest allocation of a whole weight | time of eager's | of torch.compile's"
    )
    return "\n".join([*_heading(rows), markdown(header, lines)])


_BESIDE_ADAPTERS = ("eager", "compile", "eager+checkpoint")


def _are_timed(one: Summary, other: Summary | None) -> bool:
    """Whether both took several steps: a single one is for bytes."""
    return other is not None and min(one.job.steps, other.job.steps) > 1


def techniques_block() -> str:
    """Each technique's memory and step time as a share of torch.compile's at the same sizes."""
    lines, machines = [], {}
    for name, peers in _TECHNIQUES.items():
        rows = [row for row in read_rows(RESULTS / name) if _is_in_ladder(row)]
        found = {one.job.peer: one for one in sorted(summaries_of(rows), key=lambda one: one.job.steps)}
        plain = found["compile"]
        lines.append([f"*{_TECHNIQUE_MODELS[name]}, {plain.job.sizes}*", "1.00", f"{_mib(plain)} MiB", "1.00"])
        for one in map(found.__getitem__, peers):
            times = f"{one.step_seconds / plain.step_seconds:.2f}" if _are_timed(one, plain) else "-"
            share = f"{one.peak_bytes / plain.peak_bytes:.2f}"
            label = _TECHNIQUE_LABELS.get(one.job.peer) or label_of(one.job.peer)
            lines.append([label, share, f"{_mib(one)} MiB", times])
        machines |= dict.fromkeys(machine_lines(rows))
    table = markdown(" | memory, of torch.compile's | that is | step time, of torch.compile's", lines)
    suites = ",".join(name.removesuffix("_cpu.jsonl") for name in _TECHNIQUES)
    command = f"`python -m benchmarks run --suite {suites}`, rows in `benchmarks/results/`"
    without_threads = dict.fromkeys(re.sub(r", \d+ threads, \w+", "", machine) for machine in machines)
    return "\n".join([table, "", f"{command}; {'; '.join(without_threads)}."])


def _mib(summary: Summary) -> str:
    """The peak in MiB, with three digits."""
    mib = summary.peak_bytes / MIB
    return f"{float(f'{mib:.3g}'):,.0f}" if mib >= 100 else f"{mib:.3g}"


def _is_in_ladder(row: Row) -> bool:
    """Whether a row is of the users' model, or of adapters at one number of experts."""
    is_adapted = row.job.workload == _ADAPTED and row.job.sizes.experts == _ADAPTED_EXPERTS
    return row.job.workload == "model" or is_adapted


def said_block(rows: Sequence[Row]) -> str:
    """The suite's own words about its rows, its targets among them."""
    said = "\n\n".join(map(_without_met, conclusions(rows)))
    return "\n".join([f"{_source(rows)}:", "", "```text", said, "```", *_without_figures(rows)])


def ranks_block(suite: str, say: Callable[[Findings], str]) -> str:
    """A suite of several ranks, in its own words."""
    found = Findings.from_json((RESULTS / f"{suite}_cpu.json").read_text())
    source = f"`python -m benchmarks run --suite {suite}`; {_without_software(str(found.machine))}"
    said = _without_met(say(found)).splitlines()
    return "\n".join([f"{source}:", "", "```text", *(one for one in said if not one.startswith(_LEFT_OUT)), "```"])


_LEFT_OUT = ("overlapping ", "slices ", "one round ", "experts again ", "layer again ", "kept and help ")
"""Peers of suite `ep` that its command prints and the page does not."""


def _without_met(said: str) -> str:
    """The text with one line that counts the targets met, in place of a line for each; those not met stay."""
    lines = said.splitlines()
    met = [line for line in lines if line.startswith("met ")]
    rest = [line for line in lines if not line.startswith("met ")]
    return "\n".join([*rest, *([f"met     {len(met)} targets"] if met else [])])


_SOFTWARE = "python 3.11.7, torch 2.13.0+cpu, transformers 5.23.0"
"""What docs/benchmarks.md says once of all tables; a table of other versions names them."""


def _heading(rows: Sequence[Row]) -> list[str]:
    return [f"{rows[0].job.sizes} ({_source(rows)}):", ""]


def _source(rows: Sequence[Row]) -> str:
    """The command that makes such rows, and where it was run."""
    suite = rows[0].job.suite
    rounds = 1 + max(row.round for row in rows)
    peers = {row.job.peer for row in rows}
    parts = SUITES[suite].parts(False)
    usual = {peer for part in parts for peer in part.peers}
    chosen = "" if peers == usual else f" --peers {','.join(dict.fromkeys(row.job.peer for row in rows))}"
    steps = {row.job.steps for row in rows} - {part.steps for part in parts}  # those that the command says
    times = f" --steps {max(steps)}" if steps else ""
    command = f"python -m benchmarks run --suite {suite}{chosen} --rounds {rounds}{times}"
    return f"`{command}`; {'; '.join(map(_without_software, machine_lines(rows)))}"


def _without_software(machine: str) -> str:
    """A line about a machine without the versions that the page names once."""
    return machine.removesuffix(f"; {_SOFTWARE}")


def _without_figures(rows: Sequence[Row]) -> list[str]:
    """Peers that could not run, and why."""
    measured = {row.job.key for row in rows if row.measurement}
    failed = {row.job.key: row for row in rows if row.error and row.job.key not in measured}
    peers: dict[str, list[str]] = {}
    for row in failed.values():
        why = "out of memory" if row.is_out_of_memory else str(row.error)
        peers.setdefault(f"({why}, {row.job.dtype})", []).append(row.job.peer)
    said = [f"{', '.join(names)} {why}" for why, names in peers.items()]
    return ["", "No figures: " + "; ".join(said) + "."] if said else []


def _model_ratios(summaries: Sequence[Summary]) -> str:
    by_peer = {one.job.peer: one for one in summaries}
    sentences = []
    for ours, theirs in (
        ("memfine", "compile"),
        ("memfine+checkpoint", "compile+checkpoint"),
        ("memfine+checkpoint", "compile"),
        ("memfine+head", "compile"),
        ("memfine+checkpoint+head", "compile+checkpoint"),
        *((one, other) for one in by_peer if one.endswith("MiB") for other in ("compile", "compile+checkpoint")),
    ):
        if ours in by_peer and theirs in by_peer:
            one, other = by_peer[ours], by_peer[theirs]
            peak, seconds = one.peak_bytes / other.peak_bytes, one.step_seconds / other.step_seconds
            sentences.append(f"{ours} against {theirs}: {peak:.2f} x the peak, {seconds:.2f} x the time.")
    return " ".join(sentences)


def _peak(summary: Summary | None) -> str:
    return "-" if summary is None else f"{summary.peak_bytes / MIB:.1f}"


def _whole(summary: Summary) -> str:
    return "-" if summary.last.whole_peak_bytes is None else f"{summary.last.whole_peak_bytes / MIB:.1f}"


def _time(summary: Summary | None) -> str:
    return "-" if summary is None else f"{summary.step_seconds:.2f}"


def _from(name: str, block: Callable[[Sequence[Row]], str]) -> Callable[[], str]:
    return lambda: block(read_rows(RESULTS / name))


BLOCKS: dict[str, Callable[[], str]] = {
    "techniques": techniques_block,
    "adapters": _from("adapters_cpu.jsonl", adapters_block),
    "layer": _from("layer_cpu.jsonl", layer_block),
    "model": _from("model_cpu.jsonl", model_block),
    "architectures": _from("model_cpu.jsonl", architectures_block),
    "vocab": _from("vocab_cpu.jsonl", model_block),
    "budget": _from("budget_cpu.jsonl", said_block),
    "scaling": _from("scaling_cpu.jsonl", said_block),
    "moeblaze": _from("moeblaze_cpu.jsonl", said_block),
    "compile": _from("compile_cpu.jsonl", said_block),
    "paper": _from("paper_cpu.jsonl", said_block),
    "ep": partial(ranks_block, "ep", describe),
    "paper_ep": partial(ranks_block, "paper_ep", describe_paper),
}
