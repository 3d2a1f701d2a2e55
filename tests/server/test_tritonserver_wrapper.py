"""tritonserver as it is typed: what the program on PATH adds to it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher_scripts.common.errors import ServerError
from launcher_scripts.server import installation as wrapper
from launcher_scripts.server.installation import OUR_PROGRAMS, Installation, find_installation


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    """A server that prints its arguments, laid out as in Triton's containers."""
    root = tmp_path / "tritonserver"
    for name in ("backends/python/libtriton_python.so", "backends/onnx/lib.so"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    for name, text in (
        ("bin/tritonserver", 'printf "%s\\n" "$@"\n'),
        ("backends/python/triton_python_backend_stub", "exit 0  # is_cancelled\n"),
    ):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("#!/bin/sh\n" + text)
        (root / name).chmod(0o755)
    return find_installation(str(root / "bin" / "tritonserver"))


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return tmp_path / "tmp"


def started(installation: Installation, *argv: str) -> list[str]:
    """What the server is started with."""
    program = (
        "import sys; from pathlib import Path; "
        "from launcher_scripts.server import installation as wrapper; "
        "from launcher_scripts.server.installation import find_installation; "
        "wrapper.become(find_installation(sys.argv[1]), sys.argv[2:])"
    )
    command = [sys.executable, "-c", program, str(installation.executable), *argv]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=wrapper.CHECKOUT
    ).stdout.splitlines()


def test_the_server_gets_its_options_and_the_backends(installation: Installation) -> None:
    options = ["--model-repository=/a_b", "--log-file=/a b", "--http-port", "1"]
    first, second, *others = started(installation, *options)
    folder = Path(first.removeprefix("--backend-directory="))
    assert (folder / "fastertransformer" / "model.py").is_file()
    assert (folder / "onnx" / "lib.so").is_file()
    assert (folder / "python" / "launcher_scripts" / "common" / "errors.py").is_file()
    assert second == "--disable-auto-complete-config" and others == options


@pytest.mark.parametrize("options", [["--model-repository=/a b"], ["--model-store", "/$(id)"]])
def test_a_repository_that_triton_s_shell_would_break_is_refused(
    installation: Installation, options: list[str]
) -> None:
    with pytest.raises(
        ServerError, match=r"below a path with blanks .*; change --model-repository"
    ):
        wrapper.become(installation, options)


def test_nobody_else_may_open_what_a_server_by_hand_makes(installation: Installation) -> None:
    installation.executable.write_text("#!/bin/sh\numask\n")
    assert started(installation, "--model-repository=/a") == ["0077"]


def test_what_is_given_is_not_added(installation: Installation, temporary: Path) -> None:
    options = ["--backend-directory=/b", "--disable-auto-complete-config"]
    assert started(installation, *options) == options
    assert list(temporary.iterdir()) == []


def test_the_folder_is_made_once_and_again_when_a_part_is_lost(
    installation: Installation, temporary: Path
) -> None:
    folder = wrapper.backends_folder(installation)
    made = folder.stat().st_ino
    assert wrapper.backends_folder(installation) == folder and folder.stat().st_ino == made
    (folder / "python" / "libtriton_python.so").unlink()
    assert wrapper.backends_folder(installation) == folder
    assert (folder / "python" / "libtriton_python.so").is_file()
    assert list(temporary.iterdir()) == [folder]


@pytest.mark.parametrize("kind", ["open", "link"])
def test_a_folder_of_somebody_else_is_not_used(
    installation: Installation, temporary: Path, kind: str
) -> None:
    folder = wrapper.backends_folder(installation)
    if kind == "open":
        folder.chmod(0o777)
    else:
        shutil.move(folder, temporary / "elsewhere")
        folder.symlink_to(temporary / "elsewhere")
    with pytest.raises(ServerError, match="somebody else may write to the folder of backends"):
        wrapper.backends_folder(installation)


def test_the_program_does_not_find_itself(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [str(OUR_PROGRAMS), str(installation.executable.parent)]
    monkeypatch.setenv("PATH", os.pathsep.join(folders))
    assert find_installation(None).executable == installation.executable
