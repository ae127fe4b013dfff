"""`python -m memfine_fx.planning.serving`: the same as `memfine plan serving`."""

import argparse
import sys

from memfine_fx.errors import MemfineError
from memfine_fx.planning.serving.command import add_parser, run

if __name__ == "__main__":
    options = add_parser(argparse.ArgumentParser().add_subparsers()).parse_args()
    try:
        sys.exit(run(options))
    except MemfineError as error:
        print(f"memfine: {error}", file=sys.stderr)
        sys.exit(2)
