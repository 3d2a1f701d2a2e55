"""What a server inherits of the operating system: limits, and whose its files are."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping

from launcher_scripts.common.processes import PRIVATE

# Triton's JSON parser calls itself once per bracket, 80 bytes each: a thread of the usual 8 MiB
# dies of a body of 110,000 of them. Threads get the limit's size, but 2 MiB where there is none.
STACK_BYTES = 256 << 20
OPEN_FILES = 65536

_WANTED = {resource.RLIMIT_STACK: STACK_BYTES, resource.RLIMIT_NOFILE: OPEN_FILES}


def server_limits() -> Mapping[int, tuple[int, int]]:
    """The soft and hard limits of a server's process, by resource; as high as this one may go."""
    return {kind: _raised(kind, wanted) for kind, wanted in _WANTED.items()}


def set_limits(limits: Mapping[int, tuple[int, int]]) -> None:
    """Set the limits of this process, and keep the files that it makes to its user.

    Programs that it starts inherit both. Triton makes the memory through which its processes pass
    prompts readable for everybody whom the umask does not shut out.
    """
    os.umask(PRIVATE)
    for kind, values in limits.items():
        resource.setrlimit(kind, values)


def _raised(kind: int, wanted: int) -> tuple[int, int]:
    soft, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft == resource.RLIM_INFINITY:
        return (wanted if kind == resource.RLIMIT_STACK else soft), hard
    return max(soft, wanted), hard
