"""The cluster model against published runs: time, memory, failures, histories of failures.

Nothing is measured here. Errors are printed for the packaged calibration and, separately, for calibrations fitted
without any run of the row's model; then for runs outside the fit (planner/docs/training.md says what these served for).
"""

import json

from benchmarks.suites.base import Suite


def _compute(quick: bool) -> tuple[str, str]:
    from memfine_planner.training.reliability_report import held_out, held_out_text
    from memfine_planner.training.runs import outside_runs
    from memfine_planner.training.validation import TimeRow, check_runs, runs_table, validate

    found = validate()
    outside = {name: check_runs(runs) for name, runs in outside_runs().items()}

    def entry(row: TimeRow) -> dict[str, object]:
        return {
            "run": row.run.name,
            "source": row.run.source,
            "measured": row.run.measured,
            "predicted": row.predicted,
            "left_out": row.left_out,
            "blind": row.run.blind,
            "peak_bytes": row.peak,
            "fits_in_memory": row.fits,
        }

    everything = {
        "fitted": [entry(row) for row in found.times],
        "not_fitted": {name: [entry(row) for row in rows] for name, rows in outside.items()},
        "memory": [vars(row) for row in found.memories],
        "faults": vars(found.faults),
        "histories": [vars(row) | {"within": row.is_within} for row in held_out()],
    }
    tables = "".join(f"\n\nruns outside the fit: {name}\n{runs_table(rows)}" for name, rows in outside.items())
    histories = f"\n\ninterruptions per 1,000 node-days, one history by another\n{held_out_text()}"
    return f"{found}{tables}{histories}", json.dumps(everything, indent=1)


SUITE = Suite("cluster", "predicted against published runs of clusters", compute=_compute)
