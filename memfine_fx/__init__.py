"""memfine_fx: train Mixture-of-Experts models in chunked, recomputing expert loops.

    import memfine_fx
    memfine_fx.optimize(model, memory_budget="20GiB")

finds the MoE regions of an unmodified model, rewrites them into chunked loops with recomputation, sizes the
chunks from a symbolic memory model, and compiles with Inductor (MemFine, arXiv 2511.21431).
"""

from memfine_fx.api import explain, fit, log_scalars, optimize, report, scalars, verify
from memfine_fx.compiler.optimized import restored as _restored  # noqa: F401  # pickles of models name it here
from memfine_fx.compiler.registration import register_backend as _register_backend
from memfine_fx.config import Config
from memfine_fx.errors import (
    BudgetInfeasible,
    CannotChunk,
    ChunkOutOfMemory,
    ConfigError,
    DoubleBackwardError,
    MemfineError,
)
from memfine_fx.records.verification import RegionVerification, VerifyReport
from memfine_fx.report.reports import RegionReport, Report

__all__ = [
    "BudgetInfeasible",
    "CannotChunk",
    "ChunkOutOfMemory",
    "Config",
    "ConfigError",
    "DoubleBackwardError",
    "MemfineError",
    "RegionReport",
    "RegionVerification",
    "Report",
    "VerifyReport",
    "__version__",
    "explain",
    "fit",
    "log_scalars",
    "optimize",
    "report",
    "scalars",
    "verify",
]

__version__ = "0.1.0"

_register_backend()
