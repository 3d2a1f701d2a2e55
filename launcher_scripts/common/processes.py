"""Processes: the signals that ask this one to end, who dies with whom, what /proc says, and what
a server inherits: limits, and the owner of its files.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The umask of processes whose files and shared memory nobody else may open.
PRIVATE = 0o077
# <sys/prctl.h>
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
CHECKOUT = Path(__file__).resolve().parents[2]
_LIBC = ctypes.CDLL(None)  # loaded before a fork: a forked child should do little
_LIBC.signal.restype = ctypes.c_void_p
_SIGNAL_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)

BPF_RETURN = 0x06  # opcode of a classic BPF program's return
PARENT_POLL_SECONDS = 1.0


class _BpfInstruction(ctypes.Structure):
    """struct sock_filter of <linux/filter.h>"""

    _fields_ = (
        ("code", ctypes.c_uint16),
        ("jt", ctypes.c_uint8),
        ("jf", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    )


class BpfProgram(ctypes.Structure):
    """struct sock_fprog: a classic BPF program for sockets and seccomp(2)."""

    _fields_ = (("length", ctypes.c_uint16), ("filter", ctypes.POINTER(_BpfInstruction)))

    def __init__(self, *instructions: tuple[int, int, int, int]) -> None:
        lines = [_BpfInstruction(*instruction) for instruction in instructions]
        super().__init__(len(lines), (_BpfInstruction * len(lines))(*lines))


class SignalInterruption:
    """Ends a block by KeyboardInterrupt, or for SIGTERM and SIGHUP by SystemExit.

    Python drops an exception that a handler raises while a finalizer runs, so the block asks
    with check() before each thing that it begins.
    """

    def __init__(self) -> None:
        self._received: int | None = None

    def __call__(self, received: int, _frame: FrameType | None) -> None:
        self._received = self._received or received
        self.check()

    def check(self) -> None:
        """Raise if a signal has come."""
        if self._received == signal.SIGINT:
            raise KeyboardInterrupt
        if self._received is not None:
            raise SystemExit(128 + self._received)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals of the block."""
        with stop_signals(self):
            yield


@dataclass
class StopRequest:
    """Notes the signals that ask to stop: the first one, and whether another one followed."""

    received: int | None = None
    again: bool = False

    def __call__(self, received: int, _frame: FrameType | None) -> None:
        if self.received is None:
            self.received = received
        else:
            self.again = True

    @property
    def name(self) -> str:
        return "nobody asked" if self.received is None else signal.Signals(self.received).name

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Note the signals of the block."""
        with stop_signals(self):
            yield self


@contextlib.contextmanager
def stop_signals(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Have `handler` called for the signals of the block; nohup's wish to ignore SIGHUP stays."""
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = (n for n in STOP_SIGNALS if not (nohup and n == signal.SIGHUP))
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, values in before.items():
            signal.signal(number, values)


def signal_when_parent_dies(number: int) -> None:
    """Have the kernel send this process a signal when the thread that started it ends (prctl(2)).

    A parent that has died before is not noticed: who may be late compares os.getppid() afterwards.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


@contextlib.contextmanager
def bus_errors_as(message: str, status: int = 1) -> Iterator[None]:
    """Print one line and exit with `status` if the block reads a mapped file beyond its end.

    The file was longer when it was mapped, or its disk fails. Python's own handlers run after the
    instruction that failed, which would fail again without end; this one runs instead of it, and
    nothing after it.
    """

    def exit_with_message(_number: int) -> None:
        os.write(2, f"{message}\n".encode(errors="replace"))
        os._exit(status)

    handler = _SIGNAL_HANDLER(exit_with_message)
    before = _LIBC.signal(signal.SIGBUS, ctypes.cast(handler, ctypes.c_void_p))
    try:
        yield
    finally:
        _LIBC.signal(signal.SIGBUS, ctypes.c_void_p(before))


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so as to see them end (prctl(2))."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


# States of a process.
EXITED, SUSPENDED, RUNNABLE = ("Z", "X"), ("T", "t"), "R"


@dataclass(frozen=True)
class ProcessStat:
    """Fields of /proc/<pid>/stat (proc_pid_stat(5)).

    state:   one letter
    started: clock ticks between the start of the machine and that of the process
    cpu:     clock ticks of processors that it has used
    """

    state: str
    parent: int
    started: int
    cpu: int


def seconds_since(ticks: int) -> float:
    """Return the seconds since a process started whose ProcessStat has `ticks`."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def process_stat(pid: int | str) -> ProcessStat:
    """pid: or self/task/<id>, of a thread. Raises OSError when there is no such process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    cpu = int(fields[11]) + int(fields[12])
    return ProcessStat(fields[0], int(fields[1]), int(fields[19]), cpu)


class Activity:
    """Progress of a process or a thread, however slowly the machine lets it run.

    A hanging one does not: it neither uses processors nor waits for one.
    """

    def __init__(self, pid: int | str) -> None:
        """pid: see process_stat"""
        self._pid = pid
        self._cpu: int | None = None

    def works(self) -> bool:
        """Return whether it has used a processor since it was asked last, or wants one now."""
        try:
            stat = process_stat(self._pid)
        except OSError:
            return False
        before, self._cpu = self._cpu, stat.cpu
        return stat.state == RUNNABLE or (before is not None and stat.cpu > before)


def process_name(pid: int) -> str:
    """The name of its program, cut to 15 characters. Raises OSError as process_stat does."""
    return Path(f"/proc/{pid}/comm").read_text().strip()


def start_of(pid: int) -> int | None:
    """When a process started, as in ProcessStat; None when it has ended."""
    with contextlib.suppress(OSError):
        stat = process_stat(pid)
        return None if stat.state in EXITED else stat.started
    return None


def is_suspended(pid: int) -> bool:
    """Return whether a process was stopped by a signal or a debugger."""
    with contextlib.suppress(OSError):
        return process_stat(pid).state in SUSPENDED
    return False


def this_python() -> str:
    """The interpreter of this process, also where Python is embedded in another program."""
    if sys.executable and "python" in Path(sys.executable).name:
        return sys.executable
    for folder in (sys.prefix, sys.exec_prefix):
        candidate = Path(folder) / "bin" / "python3"
        if candidate.exists():
            return str(candidate)
    result = shutil.which("python3")
    if result is None:
        raise FileNotFoundError("there is no python3 to run a process of this program with")
    return result


def this_environment() -> dict[str, str]:
    """This process's environment, with the modules it can import."""
    paths = dict.fromkeys([str(CHECKOUT), *(path for path in sys.path if path)])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


SHARED_MEMORY = Path("/dev/shm")
NAME_PREFIX = "launcher-server-"
_WORD = re.compile(r"[\w./+,:=@%-]+")
_LOCK = ".lock"


def is_word(path: str | Path) -> bool:
    """Return whether a shell that is not told where a path ends leaves it as it is.

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
        """Return the common prefix of the names of the server's shared memory regions."""
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
# loaded before a fork: a forked child should do little
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


def watch_parent(server: int) -> None:
    """Kill this process's parent once `server` is no more the parent of that."""
    model = os.getppid()
    with contextlib.suppress(OSError):  # it has ended by itself
        while process_stat(model).parent == server:
            time.sleep(PARENT_POLL_SECONDS)
        if os.getppid() == model:
            os.kill(model, signal.SIGKILL)


if __name__ == "__main__":
    watch_parent(int(sys.argv[1]))
