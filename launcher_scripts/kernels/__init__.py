"""One operation, one function; the implementations have the same names and meanings.

reference.py is the definition in plain torch and runs anywhere; fused.py is the CUDA side.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from launcher_scripts.kernels.cuda.compiling import settle_keys

KERNELS = {
    "cpu": "launcher_scripts.kernels.reference",
    "cuda": "launcher_scripts.kernels.cuda.fused",
}


def kernels_for(device_type: str) -> ModuleType:
    """The implementation for `cpu` or `cuda`; the reference where the Triton language is absent."""
    if device_type == "cuda" and find_spec("triton") is None:
        return import_module(KERNELS["cpu"])
    kernels = import_module(KERNELS[device_type])
    if device_type == "cuda":
        settle_keys(__package__)
    return kernels
