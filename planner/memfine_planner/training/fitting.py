"""Fits the calibration to measured runs: maximum a posteriori, least squares on logarithms.

Residuals are log(predicted / measured) over the runs' spread and log(value / median) over each prior's spread, so
numbers that no run informs stay at their prior, and a few runs cannot push one to an absurd value.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import approx_fprime, least_squares

from memfine_planner.costs.calibration import CALIBRATION_FILE, Calibration, Prior, priors
from memfine_planner.training.runs import Run, published_runs
from memfine_planner.training.step import step_time

__all__ = ["Fit", "fit", "leave_one_group_out", "predict"]

_SPREAD = {"iteration": 0.05, "dense": 0.06, "MoE": 0.12}
_STEP = 1e-3
_CLOSE = 1e-4
_MODULE = "memfine_planner.training.fitting"


@dataclass(frozen=True)
class Fit:
    """A fitted calibration and how many steps it took."""

    calibration: Calibration
    steps: int


def predict(run: Run, calibration: Calibration) -> float:
    """The figure that the run measured, predicted: seconds a step, or tokens/s/GPU."""
    time = step_time(run.arch, run.system, run.strategy, calibration)
    return time.seconds if run.kind == "iteration" else time.tokens_per_s_per_gpu


def fit(runs: Sequence[Run], start: Calibration | None = None, steps: int = 40) -> Fit:
    """The most probable calibration given `runs` and the priors, in at most `steps` steps."""
    known = priors()
    runs = [run for run in runs if run.calibrates]
    values = _values(start or Calibration(), known)
    found = least_squares(_residuals, values, args=(runs, known), diff_step=_STEP, max_nfev=steps)
    return Fit(_calibration(found.x, known), found.nfev)


def leave_one_group_out(runs: Sequence[Run], start: Calibration) -> dict[str, Calibration]:
    """For each group, the calibration fitted without its runs.

    One Jacobian, taken at `start` over all runs, serves all groups: in logarithms the model is nearly linear, and each
    step's residuals are exact.
    """
    known = priors()
    runs = [run for run in runs if run.calibrates]
    values = _values(start, known)
    jacobian = approx_fprime(values, _residuals, _STEP, runs, known)
    return {group: _fit_without(group, runs, values, jacobian, known) for group in sorted({run.group for run in runs})}


def _fit_without(
    group: str, runs: Sequence[Run], values: NDArray[np.float64], jacobian: NDArray[np.float64], known: Sequence[Prior]
) -> Calibration:
    kept = [run for run in runs if run.group != group]
    rows = [index for index, run in enumerate(runs) if run.group != group]
    rows += list(range(len(runs), len(jacobian)))
    found = least_squares(_residuals, values, args=(kept, known), jac=lambda *_: jacobian[rows], xtol=_CLOSE)
    return _calibration(found.x, known)


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


def write_calibration() -> str:
    """Fit to all packaged runs and write data/calibration.json; returns what was written."""
    found = fit(published_runs()).calibration
    values = {prior.name: round(getattr(found, prior.name), 5) for prior in priors()}
    note = f"Fitted to the packaged runs by python -m {_MODULE}; the others stay at their defaults."
    text = json.dumps({"note": note, "values": values}, indent=1)
    CALIBRATION_FILE.write_text(text + "\n")
    return text


if __name__ == "__main__":
    print(write_calibration())
