"""Compile models for an H100 and run their steps on fake tensors: nothing is computed, no device is there.

    make gpu-dry                          # makes an environment with a CUDA build of torch; compares with the record
    python -m benchmarks.gpu_dry --write  # there: writes benchmarks/results/gpu_dry.json and the table of docs/gpu.md
    python -m benchmarks.gpu_dry --models Mixtral-8x7B

Layers have the sizes of the published models; two of them stand for all, and one of DeepSeek-V3, two of which such a
device could not train. Weights are in bf16 but under autocast. Dynamo, this project's passes, functorch's partitioner
and Inductor run as they do for a device (`stand_in` answers in its place), and every kernel is compiled to a cubin.
Then a step runs on fake tensors: what Inductor's code would launch is counted, regions run the code that launches the
GPU kernels, and operators that wait for the device are noted (`waiting`). Peaks are those that the report predicts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu_dry.stand_in import Kernels, install, restart_once
from benchmarks.gpu_dry.table import FILE, PAGE, RUNS, Run, filled, written
from benchmarks.known_models import known_config, with_adapters

_SEQUENCES, _LENGTH = 2, 4096


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="record what is found, and write the page's table")
    every = ",".join(dict.fromkeys(run.model for run in RUNS))
    parser.add_argument("--models", default=every, help="only these, separated by commas")
    options = parser.parse_args(arguments)
    runs = [run for run in RUNS if run.model in options.models.split(",")]
    if options.write and len(runs) < len(RUNS):
        parser.error("--write records all models")
    restart_once(sys.argv[1:] if arguments is None else arguments)
    kernels = install()
    _answer_for_the_device()
    found = [dry_run(run, kernels) for run in runs]
    for row in found:
        print(json.dumps(row))
    if options.write:
        FILE.write_text(written(found))
        PAGE.write_text(filled(PAGE.read_text(), found))
        return 0
    recorded = [row for row in json.loads(FILE.read_text()) if row["model"] in {run.name for run in runs}]
    print("as recorded" if recorded == found else "not as recorded: run with --write and look at the difference")
    return int(recorded != found)


def _answer_for_the_device() -> None:
    """What this project asks of a device: rates, here of the data sheet; times of tiles and routing, unknown here."""
    from benchmarks.roofline import CHIPS, chip_figures
    from memfine_fx.kernels import tuning
    from memfine_fx.kernels.tiling import target_of, tiles_for
    from memfine_fx.plan import rates
    from memfine_fx.plan.cost import DeviceRates
    from memfine_fx.runtime import head_loop, loads

    flops, bandwidth = chip_figures(CHIPS[0])
    products = tuple((rows, flops * min(1.0, rows / 256)) for rows in (32, 128, 512, 2048))
    rates._measure = lambda *arguments: DeviceRates(products, bandwidth / 2, launch_seconds=3e-6)
    rates._measure_products = lambda *arguments: products
    head_loop._runs = lambda device: True
    tuning.tune = lambda kind, device: tiles_for(target_of(device), kind.dtype, kind.table_dtype)
    loads.LoadHistory.note_later = lambda *arguments: None


def _model(run: Run) -> Any:
    """On no device."""
    import torch
    from transformers import AutoModelForCausalLM

    config = known_config(run.model)
    config.num_hidden_layers = run.layers
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0
    config._experts_implementation = "grouped_mm"
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    dtype = torch.float32 if run.has_autocast and not run.rank else torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if run.rank:
            model = with_adapters(model, run.rank)
    if run.has_checkpoints:
        model.gradient_checkpointing_enable()
    return model.train()


def dry_run(run: Run, kernels: Kernels) -> dict[str, Any]:
    """A row: see `table`."""
    import torch
    from torch._dynamo.utils import counters
    from torch._subclasses import FakeTensorMode

    import memfine_fx
    from benchmarks.gpu_dry.regions import Regions
    from benchmarks.gpu_dry.waiting import Waiting
    from memfine_fx.compiler.reporting import report_of
    from memfine_fx.compiler.sessions import sessions
    from memfine_fx.kernels.launches import recording
    from memfine_fx.runtime.store import lookup

    torch.compiler.reset()
    kernels.compiled.clear()
    counters.clear()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = _model(run)
    with mode:
        model = model.to_empty(device="cuda")
        ids = torch.empty((_SEQUENCES, _LENGTH), dtype=torch.int64, device="cuda")
        # PEFT changes modules around each call of adapted experts, which only `optimize` is prepared for.
        compiled = memfine_fx.optimize(model) if run.rank else torch.compile(model, backend="memfine")
        for _ in range(2):  # before the second the first has shown what backward holds
            for parameter in model.parameters():
                parameter.grad = None
            kernels.launches.clear()
            with Waiting(sees_numbers=False) as waiting, Regions() as regions, recording() as launches:
                with torch.autocast("cuda", torch.bfloat16, enabled=run.has_autocast):
                    loss = compiled(input_ids=ids, labels=ids).loss
                num_forward = sum(kernels.launches.values())
                loss.backward()
    report = report_of(sessions()[-1])
    (region, *_) = regions.region_ids
    of_region = Counter(launch.name for launch in launches)
    chunks_of_head = of_region.pop("cross_entropy_kernel", 0)
    return {
        "model": run.name,
        "graph_breaks": sum(counters["graph_break"].values()),
        "regions": len(regions.region_ids),
        "generated": len(kernels.compiled),
        "forward": num_forward,
        "backward": sum(kernels.launches.values()) - num_forward,
        "windows": lookup(region).num_chunks,
        "of_regions": {kernel: count // len(regions.region_ids) for kernel, count in sorted(of_region.items())},
        "of_head": chunks_of_head,
        "waits": sorted(waiting.found),
        "peak_bytes": report.step.peak.num_bytes,
    }


if __name__ == "__main__":
    sys.exit(main())
