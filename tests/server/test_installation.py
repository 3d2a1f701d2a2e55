"""Where a server is looked for, and what its folder of backends and its environment hold."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from launcher_scripts.errors import ServerError
from launcher_scripts.server import installation
from launcher_scripts.server.installation import OUR_BACKEND, STUB, find_installation


@pytest.fixture
def container(tmp_path: Path) -> Path:
    """The layout of Triton's containers, with a FasterTransformer backend of its own."""
    root = tmp_path / "opt" / "tritonserver"
    for name in ("python", "fastertransformer", "identity"):
        (root / "backends" / name).mkdir(parents=True)
    (root / "backends" / "python" / "libtriton_python.so").write_text("library")
    (root / "backends" / "python" / STUB).write_text("#!/bin/sh\nexit 0\n")
    (root / "bin").mkdir()
    (root / "bin" / "tritonserver").write_text("#!/bin/sh\n")
    (root / "bin" / "tritonserver").chmod(0o755)
    return root


def test_the_containers_backends_with_ours_among_them(container: Path, tmp_path: Path) -> None:
    found = find_installation(str(container / "bin" / "tritonserver"))
    found.make_backends(tmp_path / "backends")
    names = sorted(path.name for path in (tmp_path / "backends").iterdir())
    assert names == ["fastertransformer", "identity", "python"]
    assert (tmp_path / "backends" / "fastertransformer").resolve() == OUR_BACKEND
    python = tmp_path / "backends" / "python"
    assert (python / "libtriton_python.so").read_text() == "library"
    assert os.access(python / STUB, os.X_OK)


def test_the_server_on_path_comes_before_the_package(
    container: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(container / "bin"))
    assert find_installation(None).executable == container / "bin" / "tritonserver"


def test_its_environment_starts_with_this_programs_python(
    container: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    environment = find_installation(str(container / "bin" / "tritonserver")).environment()
    assert environment["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"


def test_a_missing_library_is_said_in_one_line(container: Path, tmp_path: Path) -> None:
    loader = "echo 'stub: error while loading shared libraries: libpython3.so: cannot open' >&2"
    (container / "backends" / "python" / STUB).write_text(f"#!/bin/sh\n{loader}\nexit 127\n")
    found = find_installation(str(container / "bin" / "tritonserver"))
    with pytest.raises(ServerError, match=r"libpython3.so: cannot open; change .*apt-get install"):
        found.make_backends(tmp_path / "backends")


def test_a_server_without_python_backend(container: Path) -> None:
    shutil.rmtree(container / "backends" / "python")
    with pytest.raises(ServerError, match=r"no Python backend .*deploy\.server\.tritonserver"):
        find_installation(str(container / "bin" / "tritonserver"))


def test_no_server_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(installation, "CONTAINER_SERVER", tmp_path / "tritonserver")
    monkeypatch.setattr(installation.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ServerError, match=r"on PATH, .*nvidia-pytriton"):
        find_installation(None)
