"""Write docs/troubleshooting.md, or with --check only compare it.

python -m benchmarks.troubleshooting
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.troubleshooting.page import PAGE, page


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if the page is not what would be written")
    text = page()
    if parser.parse_args().check:
        return int(PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
