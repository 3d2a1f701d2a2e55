"""The implementation of the operations for a kind of device."""

from __future__ import annotations

from importlib.util import find_spec

from launcher_scripts import kernels
from launcher_scripts.kernels import reference
from launcher_scripts.kernels.cuda.compiling import settle_keys
from launcher_scripts.kernels.ops import Ops


def kernels_for(device_type: str) -> Ops:
    """The implementation for `cpu` or `cuda`; the reference where the Triton language is absent."""
    if device_type == "cuda" and find_spec("triton") is not None:
        from launcher_scripts.kernels.cuda import fused

        settle_keys(kernels.__name__)
        return fused
    if device_type not in ("cpu", "cuda"):
        raise KeyError(device_type)
    return reference
