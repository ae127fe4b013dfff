"""Records of shortened models: what another process records is what this one does, and its failure costs time only."""

from __future__ import annotations

import dataclasses
import pickle
import sys
from typing import Any

import pytest

from memfine_fx.config import Config
from memfine_fx.fitting import shortened
from memfine_fx.fitting.answer import Question, answer
from memfine_fx.fitting.recording import RecordedStep
from memfine_fx.fitting.setup import Setup
from memfine_fx.fitting.shortened import Request, can_record_meanwhile, portable, recorded_meanwhile
from memfine_fx.memory.region_bytes import ChunkSize
from memfine_fx.memory.step import RunMemory, step_peak_bytes
from tests.fitting.test_fit import config_of
from tests.plan.deep_model import TOKENS, deep_model


@pytest.fixture
def recorded_here(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let records of this process cost nothing, and return the requests for them."""
    requests: list[Any] = []

    def record(request: Request) -> str:
        requests.append(request)
        return "recorded here"

    monkeypatch.setattr(shortened, "record_shortened", record)
    return requests


def test_a_process_that_fails_leaves_the_record_to_this_one(
    recorded_here: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request("no config", Setup(), Config(), 1)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with recorded_meanwhile(request) as record:
        assert record() == "recorded here"
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with recorded_meanwhile(request) as record:
        assert record() == "recorded here"
    assert recorded_here == [request, request]


def test_a_process_that_writes_something_else_leaves_the_record_to_this_one(
    recorded_here: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/echo")  # it writes its arguments, and ends well
    with recorded_meanwhile(Request("no config", Setup(), Config(), 1)) as record:
        assert record() == "recorded here"


def test_what_cannot_be_pickled_is_recorded_here(recorded_here: list[Any]) -> None:
    request = Request(lambda: None, Setup(), Config(), 1)
    assert not can_record_meanwhile(request.source)
    with recorded_meanwhile(request) as record:
        assert record() == "recorded here"


def test_an_error_here_ends_the_other_process(recorded_here: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    processes: list[Any] = []
    popen = shortened.subprocess.Popen

    def started(*args: Any, **options: Any) -> Any:
        processes.append(popen([sys.executable, "-c", "import time; time.sleep(600)"], **options))
        return processes[0]

    monkeypatch.setattr(shortened.subprocess, "Popen", started)
    with pytest.raises(KeyError), recorded_meanwhile(Request("no config", Setup(), Config(), 1)):
        raise KeyError
    assert processes[0].poll() is not None and not recorded_here


def test_a_request_can_be_pickled() -> None:
    request = Request(config_of(), Setup(targets=("q_proj",)), Config(), 1)
    assert can_record_meanwhile(request.source) or len(shortened.os.sched_getaffinity(0)) == 1
    copied = pickle.loads(pickle.dumps(request))
    assert dataclasses.replace(copied, source=None) == dataclasses.replace(request, source=None)
    assert copied.source.to_dict() == request.source.to_dict()


@pytest.mark.campaign
def test_two_processes_answer_what_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    config, setup, question = config_of(num_hidden_layers=6), Setup(1, 128, device="cuda"), Question("1GiB")
    alone = answer(config, setup, question, Config())

    def fails(request: Request, built: object = None) -> object:
        if request.num_more == 0:
            return record(request, built)
        raise AssertionError("the other process has failed")

    record = shortened.record_shortened
    monkeypatch.setattr(shortened, "record_shortened", fails)
    monkeypatch.setattr("memfine_fx.fitting.answer.record_shortened", fails)
    monkeypatch.setattr("memfine_fx.fitting.answer.can_record_meanwhile", lambda source: True)
    assert answer(config, setup, question, Config(), in_parallel=True).to_json() == alone.to_json()


@pytest.mark.parametrize("has_room", [False, True])
def test_a_portable_record_has_the_peak_of_the_whole_one(has_room: bool) -> None:
    model = deep_model(3, has_room=has_room)
    run = RunMemory(model.step, {str(TOKENS): 512})
    record = RecordedStep({"asked": (run,), "most": (run,)}, 2, 512, (), (), "")
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        pickle.dumps(record)
    copied = pickle.loads(pickle.dumps(portable(record)))
    assert copied.runs["asked"][0].step is copied.runs["most"][0].step

    def size_of(region_id: str, num_tokens: int) -> ChunkSize:
        return ChunkSize(64)

    peaks = [step_peak_bytes(runs, size_of) for runs in (record.runs["asked"], copied.runs["asked"])]
    assert peaks[0] == peaks[1] and peaks[0]
