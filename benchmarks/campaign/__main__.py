"""``python -m benchmarks.campaign faults --count 1000`` or ``mutants --count 100``: failures and their number."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.campaign.faults import run_faults
from benchmarks.campaign.mutants import run_mutants


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.campaign", description=__doc__)
    campaigns = parser.add_subparsers(required=True)
    faults = campaigns.add_parser("faults", help="allocation failures, compiler errors, hooks' errors and interrupts")
    faults.add_argument("--count", type=int, default=1000)
    faults.add_argument("--seed", type=int, default=0)
    faults.set_defaults(run=run_faults)
    mutants = campaigns.add_parser("mutants", help="conditions of rules and checks, one changed at a time")
    mutants.add_argument("--count", type=int, default=100)
    mutants.add_argument("--seed", type=int, default=0)
    mutants.add_argument(
        "--covered", type=Path, help="data of coverage.py, of the fast tests with contexts; else they run"
    )
    mutants.set_defaults(run=run_mutants)
    options = vars(parser.parse_args())
    result = options.pop("run")(**options)
    for failure in result.failures:
        print(failure)
    print(result)
    return int(bool(result.failures))


if __name__ == "__main__":
    sys.exit(main())
