"""What identifies compiled code in a cache."""

from __future__ import annotations

import dataclasses
from typing import Any

from memfine_fx import Config
from memfine_fx.compiler.inner import partition_key

OTHER_VALUES: dict[str, Any] = {
    "axis": "tokens", "rows_per_chunk": 7, "tokens_per_chunk": 7, "bins": (1, 2), "memory_budget": "1GiB",
    "inner_backend": "aot_eager", "captures_loops": False, "chunks_head": True, "tokens_per_head_chunk": 7,
    "returns_logits": False, "idle_gradients": "none", "verify": True, "gives_up_comparison_with_eager": True,
    "disable_passes": ("low_rank",),
}  # fmt: skip


def test_no_option_is_forgotten_in_the_key_of_cached_code() -> None:
    configs = [Config(), *(Config(**{field.name: OTHER_VALUES[field.name]}) for field in dataclasses.fields(Config))]
    keys = {partition_key(config, "") for config in configs} | {partition_key(Config(), "another machine")}
    assert len(keys) == len(configs) + 1
