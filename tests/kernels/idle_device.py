"""The CPU as a Hopper GPU that compiles kernels and never runs them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from triton.runtime import driver

from launcher_scripts.kernels.device_traits import DeviceTraits, traits_of
from launcher_scripts.kernels.idle_arithmetic import IdleArithmetic
from launcher_scripts.kernels.idle_device import IdleDevice, work_on

HOPPER = DeviceTraits((9, 0), 227 << 10)  # an H100 or H200


@pytest.fixture
def idle_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[IdleDevice]:
    """The kernels for GPUs are compiled for launches on the CPU."""
    idle = IdleDevice(HOPPER)
    monkeypatch.setattr(driver, "_active", None)  # set again in the end
    work_on(idle)
    with IdleArithmetic():
        yield idle
    traits_of.cache_clear()
