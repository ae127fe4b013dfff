"""What kernels take here and what is counted, printed as JSON for the dtypes that are named: run as a script.

`--products N` draws N sizes of a gradient's product instead, for one thread and for two.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
from collections.abc import Iterator

import torch

from memfine_fx.memory.kernel_probe import Kernel, Shape, measure, shapes_of
from memfine_fx.memory.kernel_scratch import counted_at
from memfine_fx.memory.machine import cpu_features, cpu_model
from memfine_fx.memory.measure import trace_memory

__all__ = ["PRODUCTS", "most_of_products", "product_bytes", "rows", "takes_more_in_tiles"]

PRODUCTS: tuple[Kernel, ...] = ("gradient", "rows")

Row = tuple[str, str, Shape, int, int]
"""(dtype, kernel, shape, measured, counted)."""


def most_of_products() -> float:
    """Of what a formula counts, the most that a product may take here: 1 on CPUs of the kinds that were tried.

    What oneDNN takes at once follows from the caches too. Elsewhere the probe's excess is what makes budgets hold.
    """
    is_tried = any(f"AMD EPYC (family {family}," in cpu_model() for family in (25, 26))
    return 1.0 if is_tried or (cpu_features().packs_bf16 and not takes_more_in_tiles()) else 1.25


def takes_more_in_tiles() -> bool:
    """Whether this CPU's AMX kernels were seen to take up to 5 times what the formulas count for small products.

    Each such product takes some 100 KB more. The probe counts what it finds, at its own shapes.
    """
    return "(family 6, model 167)" in cpu_model()


def rows(dtype: torch.dtype) -> list[Row]:
    found: list[Row] = []
    for kernel, measured in measure(dtype).items():
        if not measured:
            continue
        for shape, num_bytes in zip(shapes_of(kernel), measured, strict=True):
            found.append((str(dtype), kernel, shape, num_bytes, _counted(kernel, shape, dtype)))
    return found


def _counted(kernel: Kernel, shape: Shape, dtype: torch.dtype) -> int:
    return counted_at(kernel, shape, dtype, torch.get_num_threads())


def product_bytes(left: int, right: int, num_rows: int, dtype: torch.dtype) -> int:
    """What [a,R] @ [R,b] takes beside its result, once its code is there."""
    factors = torch.ones(num_rows, left, dtype=dtype).t(), torch.ones(num_rows, right, dtype=dtype)
    out = torch.empty(left, right, dtype=dtype)
    product = functools.partial(torch.mm, *factors, out=out)
    product()
    return trace_memory(product, torch.device("cpu"), collects_garbage=False).peak_bytes


def _drawn_products(count: int, dtype: torch.dtype) -> Iterator[Row]:
    draws = random.Random(7)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for _ in range(count):
            left, right, num_rows = (int(2 ** draws.uniform(*logs)) for logs in ((3, 11), (3, 11), (4, 15)))
            if left * right > 1 << 20 or (left + right) * num_rows > 1 << 24:
                continue
            shape = left, right, num_rows
            yield str(dtype), "gradient", shape, product_bytes(*shape, dtype), _counted("gradient", shape, dtype)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dtypes", nargs="+")
    parser.add_argument("--products", type=int, metavar="N")
    given = parser.parse_args()
    wanted = [getattr(torch, name) for name in given.dtypes]
    print(
        json.dumps(
            [row for one in wanted for row in (_drawn_products(given.products, one) if given.products else rows(one))]
        )
    )
