"""A limit on the memory of a test: what asks for more than a little fails as on a full machine."""

from __future__ import annotations

import mmap
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MORE = 1 << 30


@contextmanager
def small_memory(more: int = MORE) -> Iterator[None]:
    """Let the process have `more` bytes of addresses besides those that it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * mmap.PAGESIZE + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
