"""The limits of the operating system that a server is started with."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from launcher_scripts.common.processes import OPEN_FILES, STACK_BYTES

CHECKOUT = Path(__file__).resolve().parents[2]
PROGRAM = """
import resource, sys
from launcher_scripts.common.processes import server_limits, set_limits
kind = getattr(resource, sys.argv[1])
_, hard = resource.getrlimit(kind)
resource.setrlimit(kind, (eval(sys.argv[2]), eval(sys.argv[3])))
set_limits(server_limits())
print(resource.getrlimit(kind)[0])
"""


@pytest.mark.parametrize(
    ("kind", "soft", "hard", "expected"),
    [
        ("RLIMIT_STACK", "8 << 20", "hard", STACK_BYTES),
        ("RLIMIT_STACK", "8 << 20", "64 << 20", 64 << 20),
        ("RLIMIT_STACK", "STACK", "hard", 2 * STACK_BYTES),
        ("RLIMIT_NOFILE", "1024", "2048", 2048),
        ("RLIMIT_NOFILE", "1024", "hard", OPEN_FILES),
    ],
)
def test_limits_are_raised_as_far_as_they_may(
    kind: str, soft: str, hard: str, expected: int
) -> None:
    most = resource.getrlimit(getattr(resource, kind))[1]
    expected = expected if most == resource.RLIM_INFINITY else min(expected, most)
    soft = soft.replace("STACK", str(2 * STACK_BYTES))
    assert limits_after(kind, soft, hard) == expected


def test_threads_get_no_small_stacks_where_there_is_no_limit() -> None:
    """The C library gives them 2 MiB then."""
    if resource.getrlimit(resource.RLIMIT_STACK)[1] != resource.RLIM_INFINITY:
        pytest.skip("this machine limits the stack")
    assert limits_after("RLIMIT_STACK", "resource.RLIM_INFINITY", "hard") == STACK_BYTES


def limits_after(kind: str, soft: str, hard: str) -> int:
    command = [sys.executable, "-c", PROGRAM, kind, soft, hard]
    return int(subprocess.check_output(command, cwd=CHECKOUT, text=True))


KEEPING = """
import os, sys
from launcher_scripts.common.processes import server_limits, set_limits
set_limits(server_limits())
file = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR, 0o644)
for mode in (0o644, 0o640):
    os.fchmod(file, mode)
    print(oct(os.fstat(file).st_mode & 0o777))
"""


def test_no_library_makes_a_file_readable_for_others(tmp_path: Path) -> None:
    """As Boost does with shared memory, whatever the umask; other modes are meant."""
    command = [sys.executable, "-c", KEEPING, str(tmp_path / "file")]
    printed = subprocess.check_output(command, cwd=CHECKOUT, text=True)
    assert printed.split() == ["0o600", "0o640"]
