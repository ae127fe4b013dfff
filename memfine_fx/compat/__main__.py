"""`python -m memfine_fx.compat`: every hook, and whether it holds with what is installed here."""

from __future__ import annotations

import importlib.util
import warnings

from memfine_fx.compat.checks import all_hooks
from memfine_fx.errors import CompatibilityWarning


def _main() -> int:
    failed = 0
    for hook in all_hooks():
        if importlib.util.find_spec(hook.host) is None:
            print(f"absent  {hook.host:<13} {hook.name}")
            continue
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            holds = hook.holds()
        failed += not holds
        print(f"{'holds ' if holds else 'FAILED'}  {hook.host:<13} {hook.name}")
        for warning in caught:
            if issubclass(warning.category, CompatibilityWarning):
                print(f"        {warning.message}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(_main())
