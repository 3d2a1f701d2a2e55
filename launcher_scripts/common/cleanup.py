"""What a server has outside of its results: a folder, and shared memory; and who removes it.

A server that is killed with all its processes cannot clean up. So every server holds a lock on
either, which its processes inherit: the kernel gives it back when the last of them is gone, and
whoever can take it then may remove what the server had. Nothing else tells as surely, since the
processes of another container or user are not seen.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
NAME_PREFIX = "launcher-server-"
_WORD = re.compile(r"[\w./+,:=@%-]+")
_LOCK = ".lock"


def is_word(path: str | Path) -> bool:
    """Whether a shell that is not told where a path ends leaves it as it is.

    Triton's Python backend starts its workers in such a shell: with the path of the server's
    backends, and with that of the model.
    """
    return _WORD.fullmatch(str(path)) is not None


def temporary_folder() -> Path:
    """The node's folder for what servers have; not TMPDIR where that is not a word for a shell."""
    folder = Path(tempfile.gettempdir())
    return folder if is_word(folder) else Path("/tmp")


class ServerLock:
    """A living server's hold on its folder, and on its name in shared memory."""

    def __init__(self, folder: Path, shared_memory: Path = SHARED_MEMORY) -> None:
        """Raises OSError where one of them cannot be written to."""
        self._folder = folder
        self._memory = shared_memory
        # What the server's processes must inherit.
        self.descriptors = (_lock(folder / _LOCK), _lock(shared_memory / f"{folder.name}{_LOCK}"))

    @property
    def region_prefix(self) -> str:
        """How the names of the server's regions of shared memory begin."""
        return _region_prefix(self._folder.name)

    def hide_memory(self) -> None:
        """Take the names off the memory that the server's processes share, once all have it open.

        The kernel frees it with the last of them, whatever ends them.
        """
        _remove_memory(self._folder.name, self._memory)

    def release(self) -> None:
        """Give all but the folder back; none of the server's processes is left."""
        self.hide_memory()
        for descriptor in self.descriptors:
            os.close(descriptor)


def remove_leftovers(
    shared_memory: Path = SHARED_MEMORY, temporary: Path | None = None
) -> list[str]:
    """Remove what this user's killed servers have left on this node; returns their names."""
    folders = temporary or temporary_folder()
    removed = {}
    for path in sorted(shared_memory.glob(f"{NAME_PREFIX}*{_LOCK}")):
        name = path.name.removesuffix(_LOCK)
        if _if_nobody_holds(path, partial(_remove_memory, name, shared_memory)):
            removed[name] = True
    for folder in sorted(folders.glob(f"{NAME_PREFIX}*")):
        if _if_nobody_holds(folder / _LOCK, partial(_remove_folder, folder)):
            removed[folder.name] = True
    return list(removed)


def _region_prefix(name: str) -> str:
    return f"{name}_"


def _remove_memory(name: str, shared_memory: Path) -> None:
    for region in shared_memory.glob(f"{_region_prefix(name)}*"):
        region.unlink(missing_ok=True)
    (shared_memory / f"{name}{_LOCK}").unlink(missing_ok=True)


def _remove_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _lock(path: Path) -> int:
    """A new file, which is locked from the moment on that it has its name."""
    unnamed = path.with_name(f".{path.name}.partial")
    descriptor = os.open(unnamed, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    unnamed.rename(path)
    return descriptor


def _if_nobody_holds(path: Path, remove: Callable[[], None]) -> bool:
    """Call `remove` where the lock is this user's and can be taken; whether it could."""
    with contextlib.suppress(OSError), _opened(path) as descriptor:  # others' are not readable
        if os.fstat(descriptor).st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove()
            return True
    return False


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
