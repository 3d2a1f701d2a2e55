"""A GPU that loads kernels and never runs them: what is launched on CPU tensors is compiled for it.

The kernels are those that the same launches compile on a GPU of the same traits, and fail like them
where one needs more shared memory or threads than there are. Their outputs stay as they were.
"""

from __future__ import annotations

from subprocess import SubprocessError
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from launcher_scripts.kernels.device_traits import DeviceTraits, traits_of

WARP_SIZE = 32
MOST_THREADS = 1024  # of a program, on every GPU there is
NO_FUNCTION = (1, 1, 0, 0, MOST_THREADS)  # module, function, registers, spills, most threads


class IdleDevice:
    """What Triton asks of a driver, beside the traits.

    loaded: the names of the kernels that were
    """

    def __init__(self, traits: DeviceTraits, *, launchers: bool = False) -> None:
        """traits: of the device it stands for;  launchers: whether the host's part of a launch is
        compiled, too, as only a machine with a GPU's driver can
        """
        self.traits = traits
        self._launchers = launchers
        self.utils = self
        self.loaded: list[str] = []

    def get_current_target(self) -> GPUTarget:
        major, minor = self.traits.capability
        return GPUTarget("cuda", 10 * major + minor, WARP_SIZE)

    def get_current_device(self) -> IdleDevice:
        return self  # Triton keeps what it has compiled by this

    def get_current_stream(self, _device: IdleDevice) -> int:
        return 0

    def get_device_properties(self, _device: IdleDevice) -> dict[str, int]:
        return {"max_shared_mem": self.traits.shared_bytes}

    def load_binary(self, name: str, *_: object) -> tuple[int, int, int, int, int]:
        """The kernel as Triton keeps it."""
        self.loaded.append(name)
        return NO_FUNCTION

    def launcher_cls(self, source: object, metadata: object) -> Any:
        """What launches the kernel: here it does nothing."""
        if self._launchers:
            nvidia.CudaLauncher(source, metadata)
        return lambda *_: None

    def compile_interface(self) -> None:
        """Have what Triton itself needs to speak to the driver."""
        if self._launchers:
            nvidia.CudaUtils()


def can_make_launchers() -> bool:
    """Whether this machine has the library of the GPU's driver."""
    try:
        return bool(nvidia.library_dirs())
    except (AssertionError, OSError, SubprocessError):
        return False


def work_on(device: IdleDevice) -> None:
    """Have this process compile for the device, whatever it has itself."""
    driver.set_active(device)
    traits_of.cache_clear()
