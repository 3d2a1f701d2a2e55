"""What a server has outside of its results: a folder, and shared memory; and who removes it.

A server that is killed with all its processes cannot clean up. So every server holds a lock that
its processes inherit: the kernel gives it back when the last of them is gone, and whoever can
take it then may remove what the server had. Nothing else tells as surely, since the processes of
another container or user are not seen.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
NAME_PREFIX = "launcher-server-"
_LOCK = ".lock"


def hold(folder: Path, shared_memory: Path = SHARED_MEMORY) -> int:
    """Take the lock of the server whose folder this is; returns the descriptor to hand down.

    Raises OSError where there is no shared memory to write to.
    """
    path = _lock_path(folder, shared_memory)
    partial = path.with_name(f".{path.name}.partial")
    descriptor = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.write(descriptor, os.fsencode(folder.absolute()))
    partial.rename(path)
    return descriptor


def region_prefix(folder: Path) -> str:
    """How the names of a server's regions of shared memory begin."""
    return f"{folder.name}_"


def remove_regions(folder: Path, shared_memory: Path = SHARED_MEMORY) -> None:
    """Remove the regions of a server by name; processes that have them open keep them."""
    for region in shared_memory.glob(f"{region_prefix(folder)}*"):
        region.unlink(missing_ok=True)


def release(folder: Path, descriptor: int, shared_memory: Path = SHARED_MEMORY) -> None:
    """Remove what a server has in shared memory; none of its processes is left."""
    remove_regions(folder, shared_memory)
    _lock_path(folder, shared_memory).unlink(missing_ok=True)
    os.close(descriptor)


def remove_remains(shared_memory: Path = SHARED_MEMORY) -> list[str]:
    """Remove what this user's killed servers have left on this node; returns their names."""
    removed = []
    for path in sorted(shared_memory.glob(f"{NAME_PREFIX}*{_LOCK}")):
        with contextlib.suppress(OSError):  # another process removes it, or it is not ours
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if _taken(descriptor):
                    _remove(path, os.read(descriptor, 4096), shared_memory)
                    removed.append(path.name.removesuffix(_LOCK))
            finally:
                os.close(descriptor)
    return removed


def _taken(descriptor: int) -> bool:
    """Whether this user's server no longer lives."""
    if os.fstat(descriptor).st_uid != os.geteuid():
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(lock: Path, content: bytes, shared_memory: Path) -> None:
    folder = Path(os.fsdecode(content))
    if _lock_path(folder, shared_memory) == lock:
        remove_regions(folder, shared_memory)
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)
    lock.unlink(missing_ok=True)


def _lock_path(folder: Path, shared_memory: Path) -> Path:
    return shared_memory / f"{folder.name}{_LOCK}"
