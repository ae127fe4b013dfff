"""Where do loss and gradients of a head stop getting faster as its chunks have more tokens?"""

import torch

from benchmarks.machine import seconds_of
from benchmarks.measures import Answer, Dtype, chunk_sweep, device_here
from memfine_fx.kernels.choice import loss_kernel_on
from memfine_fx.records.heads import HeadLoss
from memfine_fx.runtime.head_loop import HeadInputs, chunk_bounds, run_head

ROWS = (32, 64, 128, 256, 512, 1024, 2048, 4096)


def measure(
    tokens: int = 1024, hidden: int = 512, vocab: int = 131072, dtype: Dtype = "float32", rounds: int = 3
) -> Answer:
    torch.manual_seed(0)
    device = device_here()
    rows = torch.randn(tokens, hidden, device=device).to(getattr(torch, dtype))
    weight = (torch.randn(vocab, hidden, device=device) / hidden**0.5).to(rows.dtype)
    inputs = HeadInputs(rows, weight, None, torch.randint(vocab, (tokens,), device=device), None)
    kernel = loss_kernel_on(device)

    def timed(rows_per_chunk: int) -> float:
        bounds = chunk_bounds(tokens, rows_per_chunk)
        return seconds_of(lambda: run_head(inputs, HeadLoss(), bounds, (True, True, False), kernel=kernel), device)

    several = [one for one in ROWS if one <= tokens]
    timed(several[-1])  # warms up
    return chunk_sweep(several, timed, rounds)
