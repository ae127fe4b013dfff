"""The cluster model against published runs: time, memory, failures.

Nothing is measured here. Errors are printed for the packaged calibration and, separately, for calibrations fitted
without any run of the row's model; then for runs outside the fit (docs/cluster.md says what they were used for).
"""

import json
from pathlib import Path

from benchmarks.suites.base import Suite


def _compute() -> tuple[str, str]:
    from memfine_fx.cluster import runs
    from memfine_fx.cluster.validation import TimeRow, check_runs, runs_table, validate

    found = validate()
    held_out = check_runs(runs.load_runs(Path(runs.__file__).parent / "data" / "held_out_runs.json"))

    def entry(row: TimeRow) -> dict[str, object]:
        return {
            "run": row.run.name,
            "source": row.run.source,
            "measured": row.run.measured,
            "predicted": row.predicted,
            "left_out": row.left_out,
            "fits_in_memory": row.fits,
        }

    rows = {
        "fitted": [entry(row) for row in found.times],
        "not_fitted": [entry(row) for row in held_out],
        "memory": [vars(row) for row in found.memories],
        "faults": vars(found.faults),
    }
    return f"{found}\n\nruns outside the fit\n{runs_table(held_out)}", json.dumps(rows, indent=1)


SUITE = Suite("cluster", "predicted against published runs of clusters", lambda quick: (), compute=_compute)
