"""Plans training on a cluster: how fast a strategy is, whether a bad iteration fits, and what failures leave of it.

stages, step                   seconds of a stage, of a step (base, then optimised), from planning.costs
activations, memory, routing   peaks under a distribution of routing
faults                         goodput, checkpoint interval, spare nodes
tuner, plan, launch            the search, one strategy from all sides, launch flags
fitting, runs, validation      fits the few free numbers, and what they predict of published runs
report, figures, html, command text, JSON, pages, `memfine plan training`
"""

from memfine_planner.costs.model_configs import architecture
from memfine_planner.costs.strategy import Strategy, StrategyError
from memfine_planner.hardware.systems import system
from memfine_planner.training.faults import FaultModel, best_interval, checkpoint_cost, goodput
from memfine_planner.training.memory import memory, oom_risk
from memfine_planner.training.plan import make_plan
from memfine_planner.training.routing import Routing
from memfine_planner.training.step import step_time
from memfine_planner.training.tuner import Request, tune

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
