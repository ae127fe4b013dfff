"""Answers in the place of a CUDA device: an H100 that compiles and runs nothing.

torch's own tests of compiling for a device that is not there do the like. Needs a CUDA build of torch, a C compiler
and a process begun by `restart_once`, because libraries take the place of others only where they are loaded first.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

__all__ = ["Kernels", "install", "restart_once"]

_HERE = Path(__file__).parent
_MARK = "MEMFINE_STAND_IN"
_GIB = 1 << 30
_PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 * _GIB, multi_processor_count=132,
    L2_cache_size=50 << 20, warp_size=32, max_threads_per_block=1024, max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536, shared_memory_per_block_optin=227 << 10, shared_memory_per_multiprocessor=228 << 10,
    clock_rate=1_980_000, memory_clock_rate=2_619_000, memory_bus_width=5120, gcnArchName="", uuid="0",
)  # fmt: skip


def restart_once(arguments: Sequence[str]) -> None:
    """Where this process has not the libraries, it gives way to one that has, with the same arguments.

    The libraries and caches are in a folder of their own, which goes when that one ends.
    """
    if _MARK in os.environ:
        atexit.register(shutil.rmtree, os.environ[_MARK], ignore_errors=True)
        return
    folder = Path(tempfile.mkdtemp(prefix="memfine-stand-in-"))
    for source, library in (("runtime.c", "libruntime.so"), ("driver.c", "libcuda.so.1")):
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", str(folder / library), str(_HERE / source)], check=True)
    added = {
        _MARK: str(folder),
        "LD_PRELOAD": str(folder / "libruntime.so"),
        "LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "MEMFINE_GPU_KERNELS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        # What was found of this device, and code for it, is nobody else's.
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "MEMFINE_CACHE": str(folder / "memfine"),
    }
    os.execve(sys.executable, [sys.executable, "-m", "benchmarks.gpu_dry", *arguments], os.environ | added)


class Kernels:
    """Inductor's kernels: compiled, and counted where they would be launched."""

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        self.compiled: set[str] = set()

    def note_compiled(self, kernel: Any) -> None:
        """In the place of loading what was compiled."""
        assert kernel.compile_results, f"{kernel.fn.__name__} was not compiled"
        for result in kernel.compile_results:
            assert result.kernel.asm["cubin"] if hasattr(result.kernel, "asm") else result.kernel.cubin_path
        self.compiled.add(kernel.inductor_meta["kernel_name"])

    def note_launch(self, kernel: Any) -> None:
        self.launches[kernel.inductor_meta["kernel_name"]] += 1


def install() -> Kernels:
    """Put the answers in their places, for good."""
    import torch
    from torch._inductor import config
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._subclasses import FakeTensorMode, fake_tensor
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Generator(torch.Generator):
        """The host's, which says that it is the device's."""

        device = torch.device("cuda", 0)

        def clone_state(self) -> Generator:
            return Generator()

    kernels = Kernels()
    cuda: Any = torch.cuda
    answers: dict[str, Any] = {
        "_exchange_device": lambda device: 0,
        "_get_device_properties": lambda device=None: _PROPERTIES,
        "_lazy_init": lambda: None,
        "_maybe_exchange_device": lambda device: 0,
        "current_device": lambda: 0,
        "default_generators": (Generator(),),
        "device_count": lambda: 1,
        "get_device_capability": lambda device=None: (_PROPERTIES.major, _PROPERTIES.minor),
        "get_device_properties": lambda device=None: _PROPERTIES,
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "is_available": lambda: True,
        "mem_get_info": lambda device=None: (79 * _GIB, 80 * _GIB),
        "set_device": lambda device: None,
        "set_rng_state": lambda state, device="cuda": None,
        "synchronize": lambda device=None: None,
    }
    for name, answer in answers.items():
        setattr(cuda, name, answer)
    cuda.random._lazy_init = lambda: None
    torch.accelerator.is_available = lambda: False  # Dynamo would ask for the current stream
    guards: Any = torch._C._dynamo.guards
    # These make real tensors; wrappers take them from here when they are loaded.
    guards._empty_strided_cuda = _empty
    guards._reinterpret_tensor = _reinterpreted
    bare: Any = torch._C
    bare._cuda_getCurrentRawStream = lambda device: 0
    triton_helpers.set_driver_to_gpu = lambda: None
    driver.set_active(_Driver(GPUTarget("cuda", 10 * _PROPERTIES.major + _PROPERTIES.minor, _PROPERTIES.warp_size)))
    CachingAutotuner._make_launchers = lambda self: kernels.note_compiled(self)
    CachingAutotuner.run = lambda self, *arguments, **options: kernels.note_launch(self)
    FakeTensorMode.avoid_device_init = property(lambda self: True)
    fake_tensor.init_gpu_context = lambda device: None  # before torch 2.12 it makes a tensor there
    config.joint_graph_constant_folding = False  # constants are folded on the device
    return kernels


class _Driver:
    """Of Triton, as far as compiling asks it."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self.utils = SimpleNamespace()

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cuda", 0)


def _empty(size: Sequence[int], stride: Sequence[int], dtype: Any) -> Any:
    import torch

    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def _reinterpreted(tensor: Any, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> Any:
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)
