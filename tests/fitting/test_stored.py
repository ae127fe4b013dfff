"""Stored answers of `memfine fit`: a changed question misses, a damaged file is ignored, no field is lost."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from memfine_fx.config import Config
from memfine_fx.fitting import stored
from memfine_fx.fitting.alternatives import Alternative
from memfine_fx.fitting.analysis import StepTotal
from memfine_fx.fitting.answer import Question
from memfine_fx.fitting.changes import Change
from memfine_fx.fitting.report import FitReport
from memfine_fx.fitting.setup import Setup
from tests.fitting.test_fit import config_of

SETUP, QUESTION = Setup(2, 64, dtype="fp32"), Question("1GiB", device="cuda")


def report_for(setup: Setup, question: Question) -> FitReport:
    """Return an answer whose every field has something in it."""
    total = StepTotal("backward", (("gradients", 9 << 20), ("parameters", 5)))
    return FitReport(
        "qwen3_moe of 7 parameters",
        setup,
        question.memory_bytes,
        None,
        total,
        StepTotal("forward", ()),
        None,
        3,
        question.terms,
        ("model.layers.0.mlp",),
        (("head", "its logits are read"),),
        "decision",
        "how",
        (Change("optimizer='sgd'", 4, True), Change("seq=2", 5, None)),
        (Alternative("plain", total, 7, "an estimate"), Alternative("other", None, None, "failed", plan="0.5")),
        ("an estimate",),
    )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Setup]:
    """Let answers cost nothing, and return the setups that were asked for."""
    pytest.importorskip("transformers")
    setups: list[Setup] = []

    def answer(source: object, setup: Setup, question: Question, config: Config, *, in_parallel: bool) -> FitReport:
        setups.append(setup)
        return report_for(setup, question)

    monkeypatch.setattr(stored, "answer", answer)
    monkeypatch.setenv("MEMFINE_CACHE", str(tmp_path))
    return setups


def ask(source: Any, setup: Setup = SETUP, question: Question = QUESTION, *, is_new: bool = False) -> FitReport:
    return stored.answer_or_stored(source, setup, question, Config(), is_new=is_new)


def test_the_same_question_is_answered_once_and_in_full(asked: list[Setup], tmp_path: Path) -> None:
    answers = [ask(config_of()) for _ in range(2)]
    assert len(asked) == 1 and len(list(tmp_path.iterdir())) == 1
    assert answers[0] == answers[1] == report_for(SETUP, QUESTION)
    assert str(answers[0]) == str(answers[1]) and answers[0].to_json() == answers[1].to_json()
    ask(config_of(), is_new=True)
    assert len(asked) == 2


@pytest.mark.parametrize(
    "changes",
    [
        dict(batch=3),
        dict(seq=65),
        dict(train="lora"),
        dict(train="lora", lora_r=8),
        dict(train="lora", targets=("q_proj",)),
        dict(dtype="bf16"),
        dict(optimizer="sgd"),
        dict(master_weights=True),
        dict(checkpointing=True),
        dict(budget="1GiB"),
        dict(fsdp=2),
        dict(accumulate=2),
        dict(expert_parallel=2),
        dict(device="cuda"),
    ],
)
def test_a_changed_setup_is_answered_anew(changes: dict[str, Any], asked: list[Setup]) -> None:
    assert set(changes) <= {field.name for field in dataclasses.fields(Setup)}
    ask(config_of())
    changed = dataclasses.replace(SETUP, **changes)
    assert ask(config_of(), changed).setup == changed
    assert len(asked) == 2


def test_every_field_of_a_setup_and_a_question_is_part_of_the_key() -> None:
    """A field that is added later is in the key without anybody's help: the whole record is."""
    setups = [SETUP, dataclasses.replace(SETUP, lora_r=3)]
    assert [field.name for field in dataclasses.fields(SETUP) if not field.repr] == []
    assert [field.name for field in dataclasses.fields(QUESTION) if not field.repr] == []
    assert len({stored.key_of(config_of(), setup, QUESTION, Config()) for setup in setups}) == 2


@pytest.mark.parametrize(
    "question",
    [
        Question("2GiB", device="cuda"),
        Question(gpu="h100", device="cuda"),
        Question("1GiB", device="cpu"),
        Question("1GiB", device="cuda", has_even_routing=True),
        Question("1GiB", device="cuda", compares=True),
    ],
)
def test_a_changed_question_is_answered_anew(question: Question, asked: list[Setup]) -> None:
    ask(config_of())
    assert ask(config_of(), SETUP, question).memory_bytes == question.memory_bytes
    assert len(asked) == 2


def test_a_changed_model_or_version_or_thread_is_answered_anew(
    asked: list[Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    def keys() -> set[str | None]:
        return {stored.key_of(config_of(), SETUP, QUESTION, Config())}

    known = keys()
    known |= {stored.key_of(config_of(hidden_size=128), SETUP, QUESTION, Config())}
    known |= {stored.key_of(config_of("mixtral"), SETUP, QUESTION, Config())}
    known |= {stored.key_of(config_of(), SETUP, QUESTION, Config(rows_per_chunk=16))}
    hidden = config_of()
    hidden._attn_implementation = "eager"  # of no `to_dict`
    known |= {stored.key_of(hidden, SETUP, QUESTION, Config())}
    for name, value in (("MEMFINE_GPU_KERNELS", "1"), ("ONEDNN_MAX_CPU_ISA", "AVX2"), ("TORCHINDUCTOR_X", "1")):
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            known |= keys()
    versions = stored._version
    for package in ("memfine-fx", "torch", "transformers", "peft"):
        with monkeypatch.context() as patched:
            patched.setattr(stored, "_version", lambda name, new=package: "9" if name == new else versions(name))
            known |= keys()
    with monkeypatch.context() as patched:
        patched.setattr(stored, "_own_source", lambda: "changed")
        known |= keys()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        known |= keys()
    finally:
        torch.set_num_threads(threads)
    assert len(known) == 14 and None not in known
    assert keys() <= known


def test_what_is_not_of_transformers_or_is_watched_is_not_stored(
    asked: list[Setup], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(lambda: torch.nn.Linear(2, 2))
    monkeypatch.setenv("MEMFINE_LOGS", "passes")
    ask(config_of())
    assert not list(tmp_path.iterdir())


DAMAGES: dict[str, Any] = {
    "no JSON": lambda entry: None,
    "another key": lambda entry: {**entry, "key": "0" * 64},
    "no key": lambda entry: {name: value for name, value in entry.items() if name != "key"},
    "a list": lambda entry: [entry],
    "no total": lambda entry: {**entry, "totals": {}},
    "no least": lambda entry: {**entry, "totals": {**entry["totals"], "least": None}},
    "a term without a name": lambda entry: {**entry, "totals": {**entry["totals"], "least": ["forward", [[1, 2]]]}},
    "bytes as text": lambda entry: {**entry, "totals": {**entry["totals"], "least": ["forward", [["a", "2"]]]}},
    "bytes below zero": lambda entry: {**entry, "totals": {**entry["totals"], "most": ["forward", [["a", -2]]]}},
    "bytes with a point": lambda entry: {**entry, "totals": {**entry["totals"], "most": ["forward", [["a", 2.5]]]}},
    "a flag as a length": lambda entry: {**entry, "longest_seq": True},
    "a number as a text": lambda entry: {**entry, "model": 3},
    "a text as a flag": lambda entry: {**entry, "changes": [["seq=2", 4, "yes"]]},
    "too few parts": lambda entry: {**entry, "alternatives": [["plain"]]},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_foreign_entry_is_answered_anew_and_replaced(
    damage: str, asked: list[Setup], tmp_path: Path
) -> None:
    expected = ask(config_of())
    (path,) = tmp_path.iterdir()
    entry = DAMAGES[damage](json.loads(path.read_text(encoding="utf-8")))
    path.write_text("{" if entry is None else json.dumps(entry), encoding="utf-8")
    assert ask(config_of()) == expected and len(asked) == 2
    assert ask(config_of()) == expected and len(asked) == 2, "the damaged entry is replaced"
