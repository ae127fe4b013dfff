"""Import memfine_fx at `import torch` in programs that ask for it by the environment variable MEMFINE_OPTIONS.

At its import torch calls every entry point of the group "torch.backends", unless TORCH_DEVICE_BACKEND_AUTOLOAD=0.
This module stands outside of the package, because importing any module of memfine_fx registers its backend.
"""

import os

__all__ = ["import_if_asked"]


def import_if_asked() -> None:
    """Import memfine_fx, which registers its backend, where MEMFINE_OPTIONS is set, even to an empty text."""
    if "MEMFINE_OPTIONS" in os.environ:
        import memfine_fx  # noqa: F401
