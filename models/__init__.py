"""Small faithful reference MoE layers in plain torch, one spelling a file.

They are what the compiler is tested and measured on where no model library is wanted. Unless it says otherwise,
a layer takes hidden states of shape [B, S, H] or [T, H] and returns the same shape; every one is right for no
tokens and for K = E, draws no random numbers in forward, and leaves auxiliary losses to the caller.

Dimensions: T tokens, H hidden, E experts, K experts per token, F expert width, N = T * K routed rows,
C capacity.
"""

if __name__ != "memfine_fx.models":
    raise ImportError("import memfine_fx.models, not models")

from memfine_fx.models.capacity import CapacityConfig, CapacityMoE
from memfine_fx.models.deepseek import DeepseekConfig, DeepseekMoE
from memfine_fx.models.dense import DenseConfig, DenseMoE
from memfine_fx.models.dense_loop import DenseLoopConfig, DenseLoopMoE
from memfine_fx.models.gpt_oss import GptOssConfig, GptOssMoE
from memfine_fx.models.handwritten import HandwrittenConfig, HandwrittenMoE
from memfine_fx.models.hashed import HashedConfig, HashedMoE
from memfine_fx.models.indexed import IndexedConfig, IndexedMoE
from memfine_fx.models.listed_slots import ListedSlotsConfig, ListedSlotsMoE
from memfine_fx.models.llama4 import Llama4Config, Llama4MoE
from memfine_fx.models.loops import LoopConfig, LoopMoE
from memfine_fx.models.mixtral import MixtralConfig, MixtralMoE
from memfine_fx.models.naive import NaiveConfig, NaiveMoE
from memfine_fx.models.padded import PaddedConfig, PaddedMoE
from memfine_fx.models.published import PublishedConfig, PublishedMoE
from memfine_fx.models.switch import SwitchConfig, SwitchMoE
from memfine_fx.models.torchtitan import TorchtitanConfig, TorchtitanMoE
from memfine_fx.models.variants import VARIANTS, VariantConfig, VariantExperts, VariantMoE
from memfine_fx.models.zero_experts import ZeroExpertsConfig, ZeroExpertsMoE

__all__ = [
    "VARIANTS",
    "CapacityConfig",
    "CapacityMoE",
    "DeepseekConfig",
    "DeepseekMoE",
    "DenseConfig",
    "DenseLoopConfig",
    "DenseLoopMoE",
    "DenseMoE",
    "GptOssConfig",
    "GptOssMoE",
    "HandwrittenConfig",
    "HandwrittenMoE",
    "HashedConfig",
    "HashedMoE",
    "IndexedConfig",
    "IndexedMoE",
    "ListedSlotsConfig",
    "ListedSlotsMoE",
    "Llama4Config",
    "Llama4MoE",
    "LoopConfig",
    "LoopMoE",
    "MixtralConfig",
    "MixtralMoE",
    "NaiveConfig",
    "NaiveMoE",
    "PaddedConfig",
    "PaddedMoE",
    "PublishedConfig",
    "PublishedMoE",
    "SwitchConfig",
    "SwitchMoE",
    "TorchtitanConfig",
    "TorchtitanMoE",
    "VariantConfig",
    "VariantExperts",
    "VariantMoE",
    "ZeroExpertsConfig",
    "ZeroExpertsMoE",
]
