"""What kernels of the Triton language depend on beside their operands: what a device can do."""

from __future__ import annotations

import sys
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

HOPPER = (9, 0)  # the first with programmatic dependent launch
ADA = (8, 9)  # the first with e4m3


class DeviceTraits(NamedTuple):
    """A GPU as its kernels see it; without a capability it is none, but interprets them.

    capability:   compute capability
    shared_bytes: shared memory that a program may have
    """

    capability: tuple[int, int] | None
    shared_bytes: int

    @property
    def has_pdl(self) -> bool:
        """Whether kernels can use programmatic dependent launch."""
        return self.capability is not None and self.capability >= HOPPER

    @property
    def has_fp8(self) -> bool:
        """Whether kernels can read e4m3."""
        return self.capability is None or self.capability >= ADA

    @property
    def has_fp8_products(self) -> bool:
        """Whether torch multiplies e4m3 with e4m3, each row by a scale of its own."""
        return self.capability is not None and self.capability >= HOPPER

    @property
    def runs_ptx(self) -> bool:
        """Whether kernels are compiled, and can have instructions of their own."""
        return self.capability is not None

    @property
    def adds_in_float32(self) -> bool:
        """Whether products of other types can have float32 results."""
        return self.capability is not None


INTERPRETER = DeviceTraits(None, sys.maxsize)


@cache
def traits_of(device: torch.device) -> DeviceTraits:
    """The traits of a device: a CPU has those of the interpreter, the meta device those of the
    current GPU.
    """
    if device.type == "cpu":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(None if device.type == "meta" else device)
    capability = (properties.major, properties.minor)
    shared_bytes = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return DeviceTraits(capability, int(shared_bytes))


# Launch options of a kernel that starts when those before it have ended.
NO_PDL = {"USE_PDL": False}


def pdl_options(tensor: Tensor) -> dict[str, bool]:
    """Launch options of a kernel that starts before the one before it has ended, where it can."""
    return {"USE_PDL": True, "launch_pdl": True} if traits_of(tensor.device).has_pdl else NO_PDL
