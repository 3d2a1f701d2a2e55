"""The recipe of the image for jobs, with an enroot that only notes what it is asked for."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ENROOT = """#!/bin/sh
echo "$*" >> "$CALLS"
if [ "$1" = import ] || [ "$1" = export ]; then : > "$3"; fi
if [ "$1" = "$FAILS" ]; then exit 3; fi
"""


def build(
    checkout: Path, folder: Path, fails: str = "", target: str = "image.sqsh"
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    (programs / "enroot").write_text(ENROOT)
    (programs / "enroot").chmod(0o755)
    calls = folder / "calls"
    calls.touch()
    variables = {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "CALLS": str(calls),
        "FAILS": fails,
        "TORCH": "torch==2.13.0 --no-index",
    }
    ran = subprocess.run(
        ["sh", str(checkout / "requirements" / "image" / "enroot.sh"), str(folder / target)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    return ran, calls.read_text().splitlines()


def test_enroot_does_what_the_dockerfile_does(checkout: Path, tmp_path: Path) -> None:
    ran, calls = build(checkout, tmp_path)
    assert ran.returncode == 0, ran.stderr
    words = [call.split() for call in calls]
    assert [call[0] for call in words] == ["import", "create", "start", "export", "remove"]
    dockerfile = (checkout / "requirements" / "image" / "Dockerfile").read_text()
    assert f"FROM {calls[0].split('docker://')[1]}\n" in dockerfile
    assert f"--mount {checkout}/requirements:/opt/requirements --env TORCH=torch==2" in calls[2]
    command = "sh /opt/requirements/image/packages.sh"
    assert calls[2].endswith(command) and dockerfile.rstrip().endswith(command)
    assert {words[1][2], words[2][-3], words[3][-1], words[4][-1]} == {words[4][2]}
    assert {path.name for path in tmp_path.iterdir()} == {"programs", "calls", "image.sqsh"}


@pytest.mark.parametrize("fails", ["import", "create", "start", "export"])
def test_nothing_is_left_of_a_build_that_fails(checkout: Path, tmp_path: Path, fails: str) -> None:
    ran, calls = build(checkout, tmp_path, fails)
    assert ran.returncode == 3
    assert calls[-1].startswith("remove --force inference-")
    assert {path.name for path in tmp_path.iterdir()} == {"programs", "calls"}


def test_an_image_that_is_there_is_not_replaced(checkout: Path, tmp_path: Path) -> None:
    ran, calls = build(checkout, tmp_path, target="programs")
    assert (ran.returncode, calls) == (2, [])
    assert "usage: " in ran.stderr
