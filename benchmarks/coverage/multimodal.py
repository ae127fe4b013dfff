"""Deep multimodal models of transformers at toy size, with images among their inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memfine_fx.demo.tiny import TinyModel
from memfine_fx.demo.tiny_config import HIDDEN, shrink_config

__all__ = ["MULTIMODAL", "NUM_LAYERS", "MultimodalModel"]

NUM_LAYERS = 14
"""More layers than Dynamo compiles one code for (8), where a graph breaks in the loop over the layers."""

_VISION_LAYERS = 3
_PATCH, _GRID = 4, 8
"""Pixels of a patch's side, and patches of an image's side."""
_TOKENS_PER_IMAGE = (_GRID // 2) ** 2
_LARGEST_TEXT_TOKEN = 64
"""Ids of special tokens lie above, where `shrink_config` puts them."""
_VISION: dict[str, Any] = {"depth": _VISION_LAYERS, "patch_size": _PATCH}
_TEXT: dict[str, Any] = {"use_cache": True}


@dataclass(frozen=True)
class MultimodalModel:
    """One model class of transformers, how its config is made small, and what its images look like.

    Args:
        model_type: of its config.
        class_name: of the model in transformers.
        pixels: (number of images) -> the inputs that carry the images.
        overrides: fields of its config and of its nested configs, beyond what `shrink_config` changes.
        has_token_types: whether the model takes `mm_token_type_ids`.
        has_mask: whether the model needs an attention mask to compute positions.
        edge_tokens: config fields of the tokens before and after an image.
        type_of_edges: name of the input in which these tokens count as vision tokens, if the model has one.
    """

    model_type: str
    class_name: str
    pixels: Callable[[int], dict[str, torch.Tensor]]
    overrides: Mapping[str, Any]
    has_token_types: bool = True
    has_mask: bool = False
    edge_tokens: tuple[str, str] = ("vision_start_token_id", "vision_end_token_id")
    type_of_edges: str | None = None

    def build(self) -> TinyModel:
        """Return the model in train mode, with random weights, and a call with one image."""
        import transformers

        config = shrink_config(transformers.CONFIG_MAPPING[self.model_type], num_layers=NUM_LAYERS, **self.overrides)
        module: torch.nn.Module = getattr(transformers, self.class_name)(config)
        return TinyModel(module.train(), self.inputs(config), True)

    def inputs(self, config: Any, *, num_images: int = 1, text_length: int = 24) -> dict[str, torch.Tensor]:
        """Return the inputs of one sequence: its images, one behind the other, and text around them.

        Args:
            config: of the model.
            num_images: in the sequence.
            text_length: tokens of text; a third of them stands before the images.
        """
        text = torch.randint(5, _LARGEST_TEXT_TOKEN, (1, text_length))
        before, after = text.split([text_length // 3, text_length - text_length // 3], dim=1)
        start, end = (getattr(config, name, _LARGEST_TEXT_TOKEN) for name in self.edge_tokens)
        image = torch.tensor([[start, *[config.image_token_id] * _TOKENS_PER_IMAGE, end]])
        tokens = torch.cat([before, *[image] * num_images, after], dim=1)
        is_image = tokens == config.image_token_id
        inputs = {"input_ids": tokens, "labels": tokens.masked_fill(is_image, -100), **self.pixels(num_images)}
        if self.has_token_types:
            inputs["mm_token_type_ids"] = is_image.int()
        if self.type_of_edges is not None:
            inputs[self.type_of_edges] = (is_image | (tokens == start) | (tokens == end)).int()
        if self.has_mask:
            inputs["attention_mask"] = torch.ones_like(tokens)
        return inputs


def _patches(width: int) -> Callable[[int], dict[str, torch.Tensor]]:
    """Return inputs with all images' patches in one list of vectors, and the grid of each image."""

    def pixels(num_images: int) -> dict[str, torch.Tensor]:
        values = torch.randn(num_images * _GRID**2, width)
        return {"pixel_values": values, "image_grid_thw": torch.tensor([[1, _GRID, _GRID]] * num_images)}

    return pixels


def _images(num_images: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(num_images, 3, _GRID * _PATCH, _GRID * _PATCH)}


def _placed_patches(num_images: int) -> dict[str, torch.Tensor]:
    """Return inputs with the patches of each image, and the column and row of each patch."""
    columns = torch.arange(_GRID).repeat(_GRID)
    places = torch.stack([columns, torch.arange(_GRID).repeat_interleave(_GRID)], dim=-1)
    values = torch.rand(num_images, _GRID**2, 3 * _PATCH**2)
    return {"pixel_values": values, "image_position_ids": places.expand(num_images, -1, -1).contiguous()}


_QWEN: dict[str, dict[str, Any]] = {
    "vision_config": {**_VISION, "deepstack_visual_indexes": [0, 1, 2]},
    "text_config": _TEXT,
}

MULTIMODAL: dict[str, MultimodalModel] = {
    "qwen3_vl_moe with images": MultimodalModel(
        "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", _patches(6 * _PATCH**2), _QWEN
    ),
    "qwen3_omni_moe thinker with images": MultimodalModel(
        "qwen3_omni_moe_thinker",
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        _patches(6 * _PATCH**2),
        {
            **_QWEN,
            "audio_config": {"encoder_layers": 2, "output_dim": HIDDEN},
            # read by the model, and in its checkpoints' configs, but no field of the class
            "vision_start_token_id": 113,
            "vision_end_token_id": 122,
        },
        has_token_types=False,
        has_mask=True,
    ),
    "llama4 with images": MultimodalModel(
        "llama4",
        "Llama4ForConditionalGeneration",
        _images,
        {
            "vision_config": {
                "num_hidden_layers": _VISION_LAYERS,
                "patch_size": _PATCH,
                "image_size": _GRID * _PATCH,
                "intermediate_size": 4 * HIDDEN,  # the pixel shuffle puts four patches into one token
                "vision_output_dim": HIDDEN,
            },
            "text_config": _TEXT,
        },
        has_token_types=False,
        edge_tokens=("boi_token_id", "eoi_token_id"),
    ),
    "gemma4 with images": MultimodalModel(
        "gemma4",
        "Gemma4ForConditionalGeneration",
        _placed_patches,
        {
            "vision_config": {
                "num_hidden_layers": _VISION_LAYERS,
                "patch_size": _PATCH,
                "pooling_kernel_size": 2,
                "position_embedding_size": _GRID,
            },
            "audio_config": {"num_hidden_layers": 2},
            "text_config": {**_TEXT, "use_bidirectional_attention": "vision"},
        },
        edge_tokens=("boi_token_id", "eoi_token_id"),
    ),
    "glm4v_moe with images": MultimodalModel(
        "glm4v_moe",
        "Glm4vMoeForConditionalGeneration",
        _patches(6 * _PATCH**2),
        {"vision_config": {**_VISION, "image_size": _GRID * _PATCH}, "text_config": _TEXT},
        edge_tokens=("image_start_token_id", "image_end_token_id"),
    ),
    "ernie4_5_vl_moe with images": MultimodalModel(
        "ernie4_5_vl_moe",
        "Ernie4_5_VLMoeForConditionalGeneration",
        _patches(3 * _PATCH**2),
        {"vision_config": _VISION, "text_config": {**_TEXT, "moe_intermediate_size": [24, 16]}},
        edge_tokens=("image_start_token_id", "image_end_token_id"),
        type_of_edges="moe_mm_token_type_ids",
    ),
}
