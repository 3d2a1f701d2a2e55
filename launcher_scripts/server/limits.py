"""Resources that a server inherits from the operating system: limits, and the owner of its
files."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
from collections.abc import Mapping

from launcher_scripts.common.processes import BPF_RETURN, PRIVATE, BpfProgram

# Triton's JSON parser calls itself once per bracket, 80 bytes each: a thread of the usual 8 MiB
# dies of a body of 110,000 of them. Threads get the limit's size, but 2 MiB where there is none.
STACK_BYTES = 256 << 20
OPEN_FILES = 65536

_LIMITS = {resource.RLIMIT_STACK: STACK_BYTES, resource.RLIMIT_NOFILE: OPEN_FILES}


def server_limits() -> Mapping[int, tuple[int, int]]:
    """The soft and hard limits of a server's process, by resource; as high as this one may go."""
    return {kind: _raised(kind, limit) for kind, limit in _LIMITS.items()}


def set_limits(limits: Mapping[int, tuple[int, int]]) -> None:
    """Set the limits of this process, and keep the files that it makes to its user.

    Programs that it starts inherit both. Triton makes the memory through which its processes pass
    prompts with the mode 644, and with fchmod, which no umask changes: see _keep_modes.
    """
    os.umask(PRIVATE)
    if not _keep_modes():
        note = "note: this kernel lets other users of the node open Triton's shared memory while it"
        os.write(2, f"{note} starts: it has no seccomp filters\n".encode())
    for kind, values in limits.items():
        resource.setrlimit(kind, values)


def _mode_filter(audit: int, fchmod: int) -> BpfProgram:
    """A program of seccomp(2): fchmod(file, 0644) does nothing and succeeds."""
    load, equal = 0x20, 0x15
    number, architecture, mode = 0, 4, 24  # offsets in struct seccomp_data
    allow, deny = 0x7FFF0000, 0x00050000  # SECCOMP_RET_ALLOW; SECCOMP_RET_ERRNO with 0
    return BpfProgram(
        (load, 0, 0, architecture),
        (equal, 0, 5, audit),
        (load, 0, 0, number),
        (equal, 0, 3, fchmod),
        (load, 0, 0, mode),
        (equal, 0, 1, 0o644),
        (BPF_RETURN, 0, 0, deny),
        (BPF_RETURN, 0, 0, allow),
    )


# Numbers of AUDIT_ARCH and of the system calls fchmod and seccomp, by machine.
_CALLS = {"x86_64": (0xC000003E, 91, 317), "aarch64": (0xC00000B7, 52, 277)}
_KEEP = _CALLS.get(platform.machine())
_FILTER = None if _KEEP is None else _mode_filter(*_KEEP[:2])
_LIBC = ctypes.CDLL(None)  # loaded before a fork: a forked child should do little
_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER, _SPEC_ALLOW = 1, 4  # without slowing the process down (SSBD)


def _keep_modes() -> bool:
    """Let nobody in this process make a file readable for others by fchmod(file, 0644).

    Boost, which makes Triton's shared memory, does that. False where the kernel cannot do it.
    """
    if _KEEP is None or _FILTER is None or _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    done = _LIBC.syscall(_KEEP[2], _SET_MODE_FILTER, _SPEC_ALLOW, ctypes.byref(_FILTER))
    return bool(done == 0)


def _raised(kind: int, limit: int) -> tuple[int, int]:
    soft, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    if soft == resource.RLIM_INFINITY:
        return (limit if kind == resource.RLIMIT_STACK else soft), hard
    return max(soft, limit), hard
