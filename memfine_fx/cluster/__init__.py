"""Plans training on a cluster: how fast a strategy is, whether a bad iteration fits, and what failures leave of it.

    architectures, model_configs   what is trained
    systems, strategy              on what, and how, with the rules
    work -> timing -> stages, step seconds of a layer, of a stage, of a step (base, then optimised)
    activations, memory, routing   peaks under a distribution of routing
    faults                         goodput, checkpoint interval, spare nodes
    tuner, plan, launch            the search, one strategy from all sides, launch flags
    calibration, fitting, runs, validation   the few fitted numbers, and what they predict of published runs
    report, figures, html, command text, JSON, pages, `memfine plan cluster`

Needs the extra "cluster" (numpy, pydantic, pyyaml; matplotlib for figures).
"""

from memfine_fx.cluster.faults import FaultModel, best_interval, checkpoint_cost, goodput
from memfine_fx.cluster.memory import memory, oom_risk
from memfine_fx.cluster.model_configs import architecture
from memfine_fx.cluster.plan import make_plan
from memfine_fx.cluster.routing import Routing
from memfine_fx.cluster.step import step_time
from memfine_fx.cluster.strategy import Strategy, StrategyError
from memfine_fx.cluster.systems import system
from memfine_fx.cluster.tuner import Request, tune

__all__ = [
    "FaultModel",
    "Request",
    "Routing",
    "Strategy",
    "StrategyError",
    "architecture",
    "best_interval",
    "checkpoint_cost",
    "goodput",
    "make_plan",
    "memory",
    "oom_risk",
    "step_time",
    "system",
    "tune",
]
