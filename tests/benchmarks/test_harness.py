"""Records, tables, resuming, and a worker on small sizes."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks.harness import last_error_line, run_in_process, run_rounds, worker_environment
from benchmarks.machine import describe_machine
from benchmarks.records import UNAVAILABLE, Job, Machine, Row
from benchmarks.suites import SUITES, jobs_of
from benchmarks.summaries import align, summarise
from benchmarks.tables import expert_flops, format_tables
from benchmarks.worker import measure
from tests.benchmarks.rows import EAGER, MEASURED, MIB, TINY

COMPILE = replace(EAGER, peer="compile")


def test_a_row_survives_json() -> None:
    machine = Machine("cpu", 2, 2, "cpu", "3.12", "2.11", "5.17")
    row = Row(EAGER, round=1, machine=machine, measurement=MEASURED)

    assert Row.from_json(row.to_json()) == row


def test_an_error_row_survives_json() -> None:
    row = Row(EAGER, round=0, error="RuntimeError: no")

    assert Row.from_json(row.to_json()) == row


def test_equal_jobs_have_equal_keys_and_changed_ones_do_not() -> None:
    assert EAGER.key == replace(EAGER).key
    assert EAGER.key != replace(EAGER, steps=3).key
    assert EAGER.key != replace(EAGER, source="another compiler").key


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", True),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory", True),
        ("ended by signal 9", True),
        ("ended by signal 6: what():  std::bad_alloc", True),
        ("ValueError: no", False),
        (None, False),
    ],
)
def test_running_out_of_memory_is_recognised(error: str | None, expected: bool) -> None:
    assert Row(EAGER, round=0, error=error).is_out_of_memory is expected


def test_a_summary_takes_medians_over_rounds_and_compile_time_from_the_cold_one() -> None:
    warm = replace(MEASURED, step_seconds=(0.4, 0.4, 0.4), compile_seconds=1.0, cold=False)
    rows = [Row(EAGER, 0, measurement=MEASURED), Row(EAGER, 1, measurement=warm)]

    summary = summarise(rows)

    assert summary is not None
    assert summary.step_seconds == pytest.approx(0.3)
    assert (summary.step_seconds_min, summary.step_seconds_max) == (0.1, 0.4)
    assert summary.cold_compile_seconds == 7.0


def test_the_table_holds_ratios_failures_and_disagreements() -> None:
    differing = replace(MEASURED, peak_bytes=2 * MIB, step_seconds=(0.1,), value=0.6)
    rows = [
        Row(EAGER, 0, measurement=MEASURED),
        Row(COMPILE, 0, measurement=differing),
        Row(replace(EAGER, peer="diy"), 0, error="torch.OutOfMemoryError: CUDA out of memory"),
        Row(replace(EAGER, peer="memfine"), 0, error="AttributeError: no optimize"),
    ]

    lines = format_tables(rows).splitlines()

    assert lines[0] == "layer: layer, T=64 H=32 F=16 E=4 K=2, float32 on cpu"
    eager, compiled = lines[3].split(), lines[4].split()
    assert eager[:4] == ["eager", "8.0", "12.0", "4.0"] and eager[-1] == "ok"
    assert compiled[7:9] == ["0.25", "0.50"]  # peak and time against eager
    assert lines[4].endswith("VALUE DIFFERS 1.0e-01")
    assert lines[5] == "diy: OUT OF MEMORY: torch.OutOfMemoryError: CUDA out of memory"
    assert lines[6] == "memfine: FAILED: AttributeError: no optimize"


def test_columns_are_as_wide_as_their_longest_cell() -> None:
    assert align([["a", "bb"], ["long", "c"]]).splitlines() == ["a     bb", "--------", "long   c"]


def test_recomputation_counts_as_work() -> None:
    per_row = 6 * TINY.hidden * TINY.width

    assert expert_flops(TINY, "nothing") == 3 * per_row * TINY.routed_rows
    assert expert_flops(TINY, "forward") == 4 * per_row * TINY.routed_rows
    assert expert_flops(TINY, "first projection") == (3 * per_row + 2 * per_row // 3) * TINY.routed_rows


def test_rounds_are_interleaved() -> None:
    order: list[str] = []

    def run(job: Job, cache: Path, limit_s: float) -> Row:
        order.append(job.peer)
        return Row(job, 0, measurement=MEASURED)

    rows = run_rounds([EAGER, COMPILE], rounds=2, json_file=None, run=run)

    assert order == ["eager", "compile", "eager", "compile"]
    assert [row.round for row in rows] == [0, 0, 1, 1]


def test_jobs_run_at_once_in_one_cache_where_that_is_asked(tmp_path: Path) -> None:
    both_run = threading.Barrier(2, timeout=30.0)
    caches: list[Path] = []

    def run(job: Job, cache: Path, limit_s: float) -> Row:
        both_run.wait()
        caches.append(cache)
        return Row(job, 0, measurement=MEASURED)

    json_file = tmp_path / "rows.jsonl"
    rows = run_rounds([EAGER, COMPILE], rounds=1, json_file=json_file, run=run, shared_cache=tmp_path, parallel=2)

    assert [row.job.peer for row in rows] == ["eager", "compile"]
    assert len(json_file.read_text().splitlines()) == 2
    assert caches == [tmp_path, tmp_path]


def test_finished_rows_are_kept_and_failed_ones_run_again(tmp_path: Path) -> None:
    json_file = tmp_path / "rows.jsonl"
    ran: list[str] = []

    def run(job: Job, cache: Path, limit_s: float) -> Row:
        ran.append(job.peer)
        failed = job.peer == "compile" and ran.count("compile") == 1
        return Row(job, 0, error="no") if failed else Row(job, 0, measurement=MEASURED)

    for _ in range(3):
        rows = run_rounds([EAGER, COMPILE], rounds=1, json_file=json_file, run=run)

    assert ran == ["eager", "compile", "compile"]
    assert [row.error for row in rows] == [None, None]


def test_what_could_not_run_or_ran_out_of_memory_is_a_result_only_in_the_second_case() -> None:
    unavailable = Row(EAGER, 0, error=UNAVAILABLE + "deepspeed not installed")

    assert unavailable.is_unavailable and not unavailable.is_finished
    assert Row(EAGER, 0, error="RuntimeError: DefaultCPUAllocator: can't allocate memory").is_finished


def test_options_that_are_set_change_the_key() -> None:
    assert replace(EAGER, load="one").key != EAGER.key
    assert replace(EAGER, points=("T=1",)).key != EAGER.key
    assert replace(EAGER, limit_bytes=1).key != EAGER.key


def test_no_job_starts_after_the_time_limit(capsys: pytest.CaptureFixture[str]) -> None:
    def run(job: Job, cache: Path, limit_s: float) -> Row:
        raise AssertionError("no time was left")

    assert run_rounds([EAGER], rounds=1, json_file=None, run=run, total_limit_s=0.0) == []
    assert "0 of 1 rows are finished" in capsys.readouterr().out


def test_the_exception_is_found_before_a_library_s_last_words() -> None:
    stderr = "Traceback:\n  File x\ntorch._dynamo.exc.BackendCompilerFailed: no\nValueError: bad sizes\nbye\n"

    assert last_error_line(stderr) == "ValueError: bad sizes"
    assert last_error_line("killed\n") == "killed"


def test_a_worker_s_compile_cache_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")

    environment = worker_environment(tmp_path / "cache", num_threads=1)

    assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache")
    assert environment["OMP_NUM_THREADS"] == "1"
    assert "TRITON_CACHE_DIR" not in environment


@pytest.mark.parametrize("suite", [name for name, suite in SUITES.items() if suite.compute is None])
def test_every_measuring_suite_lists_jobs_with_distinct_keys(suite: str) -> None:
    keys = [job.key for job in jobs_of(suite, quick=True, peers=None, steps=1)]

    assert len(set(keys)) == len(keys) > 0


def test_an_unknown_peer_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"no peers \['tutel'\]"):
        jobs_of("layer", quick=True, peers=["eager", "tutel"], steps=1)


def test_the_gpu_suite_without_a_gpu_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert command.main(["run", "--suite", "gpu"]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err


def test_the_machine_is_described() -> None:
    machine = describe_machine(torch.device("cpu"))

    assert machine.torch == torch.__version__
    assert machine.cores >= 1 and machine.processor


def test_the_eager_layer_is_measured() -> None:
    pytest.importorskip("transformers")

    measured = measure(EAGER)

    routed_bytes = 4 * TINY.routed_rows * TINY.hidden
    assert len(measured.step_seconds) == 2
    assert measured.peak_bytes > routed_bytes
    assert measured.gradient_norm > 0
    assert measured.graphs == 0


def test_bf16_gradients_are_near_the_fp32_reference() -> None:
    pytest.importorskip("transformers")

    measured = measure(replace(EAGER, suite="gpu", workload="gradients", dtype="bfloat16", steps=1))

    assert measured.gradient_error is not None
    assert 0 < measured.gradient_error < 0.03


@pytest.mark.slow
def test_a_worker_process_returns_the_row_of_its_job(tmp_path: Path) -> None:
    pytest.importorskip("transformers")

    row = run_in_process(EAGER, tmp_path, 120)

    assert row.error is None and row.measurement is not None
    assert row.job == EAGER
    assert row.measurement.cold


@pytest.mark.slow
def test_a_worker_that_asks_for_more_than_its_limit_runs_out_of_memory(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    large = replace(EAGER, sizes=replace(TINY, sequence=1 << 18, hidden=512))

    row = run_in_process(large, tmp_path, 120, memory_limit_bytes=1 << 30)

    assert row.is_out_of_memory, row.error


@pytest.mark.slow
def test_a_worker_that_fails_leaves_its_exception(tmp_path: Path) -> None:
    row = run_in_process(replace(EAGER, sizes=replace(TINY, top_k=TINY.experts + 1)), tmp_path, 120)

    assert row.measurement is None
    assert row.error is not None and "Error" in row.error


def test_a_peer_that_is_not_installed_is_reported_without_a_process(tmp_path: Path) -> None:
    row = run_in_process(replace(EAGER, peer="scattermoe"), tmp_path, 120)

    assert row.error == "unavailable: its kernels need a CUDA device"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--suite", "layer,nothing"], "no suites ['nothing']"), (["--suite", "layer", "--parallel", "0"], "1 or more")],
)
def test_wrong_arguments_are_said(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["run", *arguments])
    assert said in capsys.readouterr().err
