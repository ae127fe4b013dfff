"""Regions whose experts the kernels run, on the host where there is no device."""

from __future__ import annotations

from typing import Any

import pytest

from memfine_fx.kernels import choice, experts


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels launched from here on, which take the host's tensors too where there is no device."""
    from memfine_fx.kernels.launches import Launch

    monkeypatch.setattr(choice, "_DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(choice, "_TIMED", ())  # tiles are launched when they are timed, too
    monkeypatch.setattr(experts, "rows_per_window", lambda sizes, figures, most: most)  # the plan's, on a device too
    monkeypatch.setenv("MEMFINE_GPU_KERNELS", "1")
    names: list[str] = []
    run = Launch.run

    def noted(self: Any) -> None:
        names.append(self.name)
        run(self)

    monkeypatch.setattr(Launch, "run", noted)
    return names
