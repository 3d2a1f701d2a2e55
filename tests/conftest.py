"""Fixtures that every room's tests may use."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import os
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

    from tests.forked_launchers import ForkedLaunchers
    from tests.server.processes import RunningStep

CHECKOUT = Path(__file__).resolve().parent.parent
SHARED_SERVER = "shared_server"  # the fixture below
SLURM_CLUSTERS = 2
# The longest first, and those that wait beside those that compute.
START_ORDER = ("slurm 0", SHARED_SERVER, "slurm 1", "tests/server/", "tests/engine/", "")
Golden = Callable[[str, str], None]

# Before torch is imported, and for all that tests start: threads that wait for each other on
# processors that are shared with other tests take twice the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A busy machine is slow to draw examples and to run with them.
hypothesis.settings.register_profile(
    "busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy")

# Collection makes a million objects that stay: a search for garbage among them costs a third.
gc.disable()

# Of the jobs that tests start, instead of the user's index.
STATE = tempfile.TemporaryDirectory(prefix="launcher-test-state-")
os.environ["XDG_STATE_HOME"] = STATE.name


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite tests/golden after a wanted change"
    )
    parser.addoption("--nemo-python", help="a Python with nemo_toolkit, for tests that run NeMo")


def pytest_configure(config: pytest.Config) -> None:
    """Signals reach what tests start, also where this process was started in the background.

    A shell has background jobs ignore SIGINT, and nohup SIGHUP; what is ignored stays so in
    children, but not what is handled.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    if hasattr(config, "workerinput") and config.args == config.getini("testpaths"):
        import_tests(config.workerinput["workerid"], config.workerinput["workercount"])


def import_tests(worker: str, count: int) -> None:
    """Import all tests in another order than the other workers do.

    All rewrite what no bytecode is there for. So everyone finds what the others have written.
    Collection says what cannot be imported.
    """
    paths = sorted((CHECKOUT / "tests").rglob("test_*.py"))
    first = int(worker.removeprefix("gw")) * len(paths) // count
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path in (*paths[first:], *paths[:first]):
            with contextlib.suppress(Exception, pytest.skip.Exception):
                importlib.import_module(".".join(path.relative_to(CHECKOUT).with_suffix("").parts))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(
        key=lambda item: list(map(group_of(item.nodeid).startswith, START_ORDER)).index(True)
    )


@functools.cache
def file_group(file: str) -> str:
    """The name of the files that one worker runs, so that what they share is started once."""
    path = CHECKOUT / file
    if path.parent.name == "slurm":
        return f"slurm {sorted(path.parent.glob('test_*.py')).index(path) % SLURM_CLUSTERS}"
    return SHARED_SERVER if SHARED_SERVER in path.read_text(encoding="utf-8") else file


def group_of(nodeid: str) -> str:
    return file_group(nodeid.partition("::")[0])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """With --dist loadfile, the files of a group stay together, too."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False
    return GroupScheduling(config, log)


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The root of this checkout."""
    return CHECKOUT


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of large fixtures that may stand beside the checkout; the test skips without."""
    folder = CHECKOUT.parent / "shared"
    if not (folder / "fixtures").is_dir():
        pytest.skip(f"there is no folder of fixtures at {folder}")
    return folder


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The small data that ships with the tests; tests/data/SOURCES.md says where it is from."""
    return CHECKOUT / "tests" / "data"


@pytest.fixture(scope="session")
def launchers() -> Iterator[ForkedLaunchers]:
    """Runs launchers, as a user does, for less."""
    from tests.forked_launchers import ForkedLaunchers

    launchers = ForkedLaunchers()
    yield launchers
    launchers.close()


@pytest.fixture
def golden(data_dir: Path, request: pytest.FixtureRequest) -> Golden:
    """Compare a text with a file of tests/golden, or with --update-golden rewrite the file."""

    def compare(name: str, text: str) -> None:
        path = data_dir.parent / "golden" / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.read_text(encoding="utf-8") == text

    return compare


@pytest.fixture(scope="session")
def tritonserver() -> None:
    """A tritonserver and what its backend needs are installed; the test skips without."""
    for package in ("pytriton", "torch"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the pip-installable tritonserver needs {package}, which is not there")


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStep]:
    """A server for every test that only asks; see tests/server/shared.py."""
    shared = importlib.import_module("tests.server.shared")
    with shared.shared_server(tmp_path_factory.mktemp("shared_server")) as step:
        yield step


@pytest.fixture
def cuda() -> str:
    """The CUDA device's name; the test skips where there is none."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return str(torch.cuda.get_device_name())
