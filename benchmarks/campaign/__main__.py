"""``python -m benchmarks.campaign faults --count 1000``: one line that says what held, and a line for what did not."""

from __future__ import annotations

import argparse
import sys

from benchmarks.campaign.faults import run_faults


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.campaign", description=__doc__)
    campaigns = parser.add_subparsers(required=True)
    faults = campaigns.add_parser("faults", help="allocation failures, compiler errors, hooks' errors and interrupts")
    faults.add_argument("--count", type=int, default=1000)
    faults.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    result = run_faults(options.count, options.seed)
    for failure in result.failures:
        print(failure)
    print(result)
    return int(bool(result.failures))


if __name__ == "__main__":
    sys.exit(main())
