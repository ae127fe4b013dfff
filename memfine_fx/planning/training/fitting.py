"""Fits the calibration to measured runs: maximum a posteriori, Gauss-Newton on logarithms.

Residuals are log(predicted / measured) over the runs' spread and log(value / median) over each prior's spread, so
numbers that no run informs stay at their prior, and a few runs cannot push one to an absurd value.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from memfine_fx.planning.costs.calibration import CALIBRATION_FILE, Calibration, Prior, priors
from memfine_fx.planning.training.runs import Run, published_runs
from memfine_fx.planning.training.step import step_time

__all__ = ["Fit", "fit", "leave_one_group_out", "predict"]

_SPREAD = {"iteration": 0.05, "dense": 0.06, "MoE": 0.12}
_STEP = 0.01
_MODULE = "memfine_fx.planning.training.fitting"


@dataclass(frozen=True)
class Fit:
    """A fitted calibration and how many Gauss-Newton steps it took."""

    calibration: Calibration
    steps: int


def predict(run: Run, calibration: Calibration) -> float:
    """The figure that the run measured, predicted: seconds a step, or tokens/s/GPU."""
    time = step_time(run.arch, run.system, run.strategy, calibration)
    return time.seconds if run.kind == "iteration" else time.tokens_per_s_per_gpu


def fit(runs: Sequence[Run], start: Calibration | None = None, steps: int = 8) -> Fit:
    """The most probable calibration given `runs` and the priors."""
    known = priors()
    runs = [run for run in runs if run.calibrates]
    values = _values(start or Calibration(), known)
    taken = 0
    while taken < steps:
        taken += 1
        change = _gauss_newton(values, runs, known)
        values = values + np.clip(change, -0.5, 0.5)
        if float(np.abs(change).max()) < 1e-3:
            break
    return Fit(_calibration(values, known), taken)


def leave_one_group_out(runs: Sequence[Run], start: Calibration, steps: int = 6) -> dict[str, Calibration]:
    """For each group, the calibration fitted without its runs.

    One Jacobian, taken at `start` over all runs, serves all groups (chord iterations): in logarithms the model is
    nearly linear, and each step's residuals are exact.
    """
    known = priors()
    runs = [run for run in runs if run.calibrates]
    jacobian = _jacobian(_values(start, known), runs, known)
    return {
        group: _fit_without(group, runs, _values(start, known), jacobian, known, steps)
        for group in sorted({run.group for run in runs})
    }


def _fit_without(
    group: str,
    runs: Sequence[Run],
    values: NDArray[np.float64],
    jacobian: NDArray[np.float64],
    known: Sequence[Prior],
    steps: int,
) -> Calibration:
    kept = [run for run in runs if run.group != group]
    rows = [index for index, run in enumerate(runs) if run.group != group]
    rows += list(range(len(runs), len(jacobian)))
    for _ in range(steps):
        change = np.linalg.lstsq(jacobian[rows], -_residuals(values, kept, known), rcond=None)[0]
        values = values + np.clip(change, -0.5, 0.5)
        if float(np.abs(change).max()) < 3e-3:
            break
    return _calibration(values, known)


def _values(calibration: Calibration, known: Sequence[Prior]) -> NDArray[np.float64]:
    return np.array([np.log(getattr(calibration, prior.name)) for prior in known])


def _calibration(values: NDArray[np.float64], known: Sequence[Prior]) -> Calibration:
    named = {prior.name: float(np.exp(value)) for prior, value in zip(known, values, strict=True)}
    # A fraction above one is no fraction: overlap cannot hide more than there is.
    return replace(Calibration(), **{name: min(value, 0.97) if value < 2 else value for name, value in named.items()})


def _residuals(values: NDArray[np.float64], runs: Sequence[Run], known: Sequence[Prior]) -> NDArray[np.float64]:
    calibration = _calibration(values, known)
    timed = [np.log(predict(run, calibration) / run.measured) / _SPREAD[run.family] for run in runs]
    believed = [(v - np.log(prior.median)) / prior.spread for v, prior in zip(values, known, strict=True)]
    return np.array(timed + believed)


def _gauss_newton(values: NDArray[np.float64], runs: Sequence[Run], known: Sequence[Prior]) -> NDArray[np.float64]:
    here = _residuals(values, runs, known)
    return np.asarray(np.linalg.lstsq(_jacobian(values, runs, known), -here, rcond=None)[0], dtype=np.float64)


def _jacobian(values: NDArray[np.float64], runs: Sequence[Run], known: Sequence[Prior]) -> NDArray[np.float64]:
    here = _residuals(values, runs, known)
    columns = []
    for index in range(len(values)):
        moved = values.copy()
        moved[index] += _STEP
        columns.append((_residuals(moved, runs, known) - here) / _STEP)
    return np.stack(columns, axis=1)


def write_calibration() -> str:
    """Fit to all packaged runs and write data/calibration.json; returns what was written."""
    found = fit(published_runs(), steps=40).calibration
    values = {prior.name: round(getattr(found, prior.name), 5) for prior in priors()}
    note = f"Fitted to the packaged runs by python -m {_MODULE}; the others stay at their defaults."
    text = json.dumps({"note": note, "values": values}, indent=1)
    CALIBRATION_FILE.write_text(text + "\n")
    return text


if __name__ == "__main__":
    print(write_calibration())
