"""How figures grow: straight lines and powers, by least squares."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """y = slope * x + offset, and the share of y's variance that it explains."""

    slope: float
    offset: float
    r_squared: float


def fit_line(x: Sequence[float], y: Sequence[float]) -> Line:
    """Least squares over at least two different x.

    Raises:
        ValueError: fewer than two different x.
    """
    if len(set(x)) < 2 or len(x) != len(y):
        raise ValueError(f"a line needs two different x and as many y, got {len(set(x))} and {len(x)} against {len(y)}")
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((one - mean_x) ** 2 for one in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    offset = mean_y - slope * mean_x
    total = sum((one - mean_y) ** 2 for one in y)
    missed = sum((b - slope * a - offset) ** 2 for a, b in zip(x, y, strict=True))
    return Line(slope, offset, 1.0 if total == 0 else 1 - missed / total)


def fit_power(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent of y ~ x ** exponent."""
    return fit_line([math.log(one) for one in x], [math.log(one) for one in y]).slope
