"""Where a server is looked for, and what its folder of backends and its environment hold."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

from launcher_scripts.common.errors import ServerError
from launcher_scripts.server import installation
from launcher_scripts.server.installation import OUR_BACKEND, STUB, find_installation, prefer_numpy


@pytest.fixture
def container(tmp_path: Path) -> Path:
    """The layout of Triton's containers, with a FasterTransformer backend of its own."""
    root = tmp_path / "opt" / "tritonserver"
    for name in ("python", "fastertransformer", "identity"):
        (root / "backends" / name).mkdir(parents=True)
    (root / "backends" / "python" / "libtriton_python.so").write_text("library")
    (root / "backends" / "python" / STUB).write_text("#!/bin/sh\nexit 0\n# is_cancelled\n")
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
    (container / "backends" / "python" / STUB).write_text(
        f"#!/bin/sh\n{loader}\nexit 127\n# is_cancelled\n"
    )
    found = find_installation(str(container / "bin" / "tritonserver"))
    with pytest.raises(ServerError, match=r"libpython3.so: cannot open; change .*apt-get install"):
        found.make_backends(tmp_path / "backends")


def test_an_old_servers_missing_options_are_named(container: Path) -> None:
    program = container / "bin" / "tritonserver"
    program.write_text(
        "#!/bin/sh\nprintf '  --http-port <integer>\\n\\t--model-repository <x>\\n'\n"
    )
    found = find_installation(str(program))
    assert not found.names_memory_apart
    found.require_options(["--http-port=1", "--model-repository=/m"])
    with pytest.raises(ServerError, match=r"too old.*got \['--http-restricted-api'\].*24\.01"):
        found.require_options(["--http-port=1", "--http-restricted-api=trace:a=b"])
    (container / "backends" / "python" / "libtriton_python.so").write_bytes(b"\0boost::uuids\0")
    assert found.names_memory_apart
    found.require_options(["--http-restricted-api=trace:a=b"])


def test_a_server_older_than_backends_in_python_is_refused(container: Path, tmp_path: Path) -> None:
    (container / "backends" / "python" / STUB).write_text("#!/bin/sh\nexit 0\n")
    found = find_installation(str(container / "bin" / "tritonserver"))
    with pytest.raises(ServerError, match=r"too old; got .*; choices: Triton 2\.39 .*23\.10"):
        found.make_backends(tmp_path / "backends")
    assert not (tmp_path / "backends").exists()


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


def numpy_folder(folder: Path, version: str, suffix: str) -> Path:
    """What pip leaves of numpy, as far as it is looked at."""
    (folder / "numpy" / "core").mkdir(parents=True)
    (folder / "numpy.libs").mkdir()
    (folder / "numpy" / "core" / f"_multiarray_umath{suffix}").touch()
    metadata = folder / f"numpy-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: numpy\nVersion: {version}\n")
    return folder


def test_a_numpy_for_the_text_models_is_found_first(container: Path, tmp_path: Path) -> None:
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    folder = numpy_folder(tmp_path / "numpy1", "1.26.4", suffix)
    found = find_installation(str(container / "bin" / "tritonserver"), str(folder))
    assert found.numpy_dir == folder
    (tmp_path / "work").mkdir()
    prefer_numpy(tmp_path / "work", folder)
    assert (tmp_path / "work" / "numpy" / "core").is_dir()
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == ["numpy", "numpy.libs"]


@pytest.mark.parametrize(
    ("version", "suffix", "reason"),
    [
        ("2.3.5", ".so", "must hold numpy 1; got '2.3.5'; change deploy.server.numpy_dir"),
        ("1.26.4", ".cpython-27-other.so", "for another Python"),
    ],
)
def test_a_numpy_that_does_not_help_is_refused(
    container: Path, tmp_path: Path, version: str, suffix: str, reason: str
) -> None:
    folder = numpy_folder(tmp_path / "numpy1", version, suffix)
    with pytest.raises(ServerError, match=reason):
        find_installation(str(container / "bin" / "tritonserver"), str(folder))
    with pytest.raises(ServerError, match="must hold numpy 1; got 'no numpy'"):
        find_installation(str(container / "bin" / "tritonserver"), str(tmp_path / "nowhere"))
