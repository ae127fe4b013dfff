"""Every transformers family that has experts, as installed: found in its source, so that none is left out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Family", "moe_families"]

_EXPERT_CLASS = re.compile(r"^class \w*(Experts?|MoE|Moe|MoeBlock|SparseMLP)\(", re.MULTILINE)


@dataclass(frozen=True)
class Family:
    """One folder of transformers' models, and the model types that its configs register, best first."""

    name: str
    model_types: tuple[str, ...]


def moe_families() -> list[Family]:
    """Families whose modeling files define a class of experts, in alphabetical order."""
    import transformers

    types = _types_by_folder()
    folder = Path(transformers.__file__).parent / "models"
    return [
        Family(path.name, types.get(path.name, ()))
        for path in sorted(folder.iterdir())
        if any(_EXPERT_CLASS.search(file.read_text(encoding="utf-8")) for file in path.glob("modeling_*.py"))
    ]


def _types_by_folder() -> dict[str, tuple[str, ...]]:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    types: dict[str, list[str]] = {}
    for model_type in CONFIG_MAPPING:
        types.setdefault(model_type_to_module_name(model_type), []).append(model_type)
    return {folder: tuple(sorted(found, key=lambda name: _rank(folder, name))) for folder, found in types.items()}


def _rank(folder: str, model_type: str) -> tuple[int, str]:
    """The family's own type first, then its text models."""
    if model_type.replace("-", "_") == folder:
        return 0, model_type
    return (1 if model_type.endswith(("text", "model")) else 2), model_type
