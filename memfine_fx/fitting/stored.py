"""Store answers of the command `memfine fit` on disk, below MEMFINE_CACHE, and read them when they are asked for again.

An answer is stored under a digest of all that it depends on (`_parts`), so nothing of it ever has to be invalidated.
Only models that transformers builds from a config are stored: what other code makes may change without a trace. A file
is JSON and every field of it is checked, since it may be torn, edited or another program's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from memfine_fx.config import Config
from memfine_fx.fitting.alternatives import Alternative
from memfine_fx.fitting.analysis import StepTotal
from memfine_fx.fitting.answer import Question, answer
from memfine_fx.fitting.changes import Change
from memfine_fx.fitting.models import loaded_config
from memfine_fx.fitting.report import FitReport
from memfine_fx.fitting.setup import Setup
from memfine_fx.memory.machine import DamagedFile, load_measurement, measurement_key, save_measurement
from memfine_fx.progress import stages

__all__ = ["answer_or_stored", "decoded", "encoded", "key_of"]

_PACKAGES = ("memfine-fx", "torch", "transformers", "peft", "bitsandbytes", "accelerate", "numpy", "sympy")
_VARIABLES = ("MEMFINE_", "TORCH", "PYTORCH_", "OMP_", "MKL_", "ATEN_", "TRANSFORMERS_", "CUDA_VISIBLE_DEVICES")
"""Beginnings of the names of environment variables that may change an answer."""
_WITHOUT_EFFECT = ("MEMFINE_CACHE", "MEMFINE_QUIET")
_SHOWN_WHILE_COMPILING = ("MEMFINE_DUMP", "MEMFINE_LOGS", "TORCH_LOGS", "TORCH_TRACE")
"""Variables of users who want to see what is compiled; a stored answer compiles nothing."""


def answer_or_stored(source: object, setup: Setup, question: Question, config: Config, *, is_new: bool) -> FitReport:
    """Return the stored answer to a question, which has no `analysis`; or answer the question and store that.

    Args:
        is_new: whether to answer the question even if an answer is stored, for what needs the `analysis`.
    """
    question.memory_bytes  # noqa: B018  # an unknown device is named before the config is read
    source = loaded_config(source)
    key = key_of(source, setup, question, config)
    if key is None:
        return answer(source, setup, question, config, in_parallel=True)
    if not is_new:
        stored: FitReport | None = load_measurement(
            _file_name(key), lambda fields: decoded(fields, key, setup, question)
        )
        if stored is not None:
            stages.info("the same question was answered before: the stored answer is shown")
            return stored
    report = answer(source, setup, question, config, in_parallel=True)
    save_measurement(_file_name(key), {"key": key, **encoded(report)})
    return report


def _file_name(key: str) -> str:
    return f"fit_{key[:32]}"


def key_of(source: object, setup: Setup, question: Question, config: Config) -> str | None:
    """Return the digest of all that an answer depends on; None for a question whose answer is not stored."""
    is_of_transformers = type(source).__module__.startswith("transformers.") and hasattr(source, "model_type")
    if not is_of_transformers or any(os.environ.get(name) for name in _SHOWN_WHILE_COMPILING):
        return None
    return hashlib.sha256(repr(list(_parts(source, setup, question, config))).encode()).hexdigest()


def _parts(source: object, setup: Setup, question: Question, config: Config) -> Iterator[object]:
    yield _own_source(), platform.python_version()
    yield [(name, _version(name)) for name in _PACKAGES]
    yield measurement_key("cpu"), torch.get_num_threads(), torch.cuda.is_available()
    yield sorted(
        item for item in os.environ.items() if item[0].startswith(_VARIABLES) and item[0] not in _WITHOUT_EFFECT
    )
    yield setup, question, config
    yield list(_fields_of(source))


def _own_source() -> str:
    """Return a digest of this package's modules: the version stays as it is while they are worked on."""
    digest = hashlib.sha256()
    folder = Path(__file__).resolve().parent.parent
    # NOTE: in a checkout some rooms are symbolic links, which rglob does not follow.
    modules = (Path(place, name) for place, _, names in os.walk(folder, followlinks=True) for name in names)
    for path in sorted(path for path in modules if path.suffix == ".py"):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _fields_of(config: Any) -> Iterator[object]:
    """Yield every attribute of a config, also those that its `to_dict` leaves out, such as the chosen attention."""
    yield type(config).__qualname__
    for name, value in sorted(vars(config).items()):
        yield name, list(_fields_of(value)) if hasattr(value, "to_dict") else repr(value)


def encoded(report: FitReport) -> dict[str, Any]:
    """Return an answer as JSON's types, without what the question says: the setup and the device's own terms."""
    return {
        "model": report.model,
        "totals": {name: _encoded_total(getattr(report, name)) for name in ("asked", "least", "most")},
        "longest_seq": report.longest_seq,
        "largest_batch": report.largest_batch,
        "chunked": report.chunked,
        "refused": report.refused,
        "decision": report.decision,
        "how": report.how,
        "estimates": report.estimates,
        "changes": [dataclasses.astuple(change) for change in report.changes],
        "alternatives": [
            [other.what, _encoded_total(other.total), other.longest_seq, other.remark, other.plan]
            for other in report.alternatives
        ],
    }


def _encoded_total(total: StepTotal | None) -> Any:
    return None if total is None else [total.where, total.terms]


def decoded(fields: Any, key: str, setup: Setup, question: Question) -> FitReport:
    """Return the answer that `encoded` was given, for the question with this key.

    Raises:
        DamagedFile: it answers another question, or a field has another type.
    """
    if fields["key"] != key:
        raise DamagedFile(f"expected an answer to {key}, got {str(fields['key'])[:80]}")
    as_asked, least, most = (_total(fields["totals"][name]) for name in ("asked", "least", "most"))
    if least is None or most is None:
        raise DamagedFile("expected the bytes of the smallest and of the largest budget, got none")
    return FitReport(
        _text(fields["model"]),
        setup,
        question.memory_bytes,
        as_asked,
        least,
        most,
        _number_or_none(fields["longest_seq"]),
        _number_or_none(fields["largest_batch"]),
        question.terms,
        tuple(map(_text, fields["chunked"])),
        tuple((_text(where), _text(reason)) for where, reason in fields["refused"]),
        _text(fields["decision"]),
        _text(fields["how"]),
        tuple(Change(_text(what), _number(least), _flag_or_none(fits)) for what, least, fits in fields["changes"]),
        tuple(
            Alternative(_text(what), _total(total), _number_or_none(seq), _text(remark), plan=_text(plan))
            for what, total, seq, remark, plan in fields["alternatives"]
        ),
        tuple(map(_text, fields["estimates"])),
    )


def _total(fields: Any) -> StepTotal | None:
    if fields is None:
        return None
    where, terms = fields
    return StepTotal(_text(where), tuple((_text(name), _number(num_bytes)) for name, num_bytes in terms))


def _checked(has_type: Callable[[object], bool], expected: str, value: Any) -> Any:
    if not has_type(value):
        raise DamagedFile(f"expected {expected}, got {str(value)[:40]!r}")
    return value


def _text(value: object) -> str:
    text: str = _checked(lambda read: isinstance(read, str), "a text", value)
    return text


def _number(value: object) -> int:
    number: int = _checked(
        lambda read: isinstance(read, int) and not isinstance(read, bool) and read >= 0, "a number of bytes", value
    )
    return number


def _number_or_none(value: object) -> int | None:
    return None if value is None else _number(value)


def _flag_or_none(value: object) -> bool | None:
    flag: bool | None = _checked(lambda read: read is None or isinstance(read, bool), "true, false or null", value)
    return flag
