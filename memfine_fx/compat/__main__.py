"""`python -m memfine_fx.compat`: every feature, and whether it holds with what is installed here."""

from __future__ import annotations

import importlib.util
import warnings

from memfine_fx.compat.checks import all_features
from memfine_fx.errors import CompatibilityWarning


def _main() -> int:
    failed = 0
    for feature in all_features():
        if importlib.util.find_spec(feature.package) is None:
            print(f"absent  {feature.package:<13} {feature.name}")
            continue
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            holds = feature.holds()
        failed += not holds
        print(f"{'holds ' if holds else 'FAILED'}  {feature.package:<13} {feature.name}")
        for warning in caught:
            if issubclass(warning.category, CompatibilityWarning):
                print(f"        {warning.message}")
    print(f"{failed} failed; packages that are absent need nothing" if failed else "all hold that are needed here")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(_main())
