"""Packages that a stock image lacks: what a step says of them, and the folder that has them."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from launcher_scripts.common import packages
from launcher_scripts.common.packages import LATER_STEPS
from stages import STAGES
from tests.whole_job import WORDS, run_whole_job

STEPS = sorted({module for stage in STAGES.values() for module in stage.modules})


def make_wheel(
    folder: Path, name: str, requires: Sequence[str] = (), tag: str = "py3-none-any"
) -> None:
    """A wheel of version 1.0 whose module says for which tag it is."""
    info = f"{name}-1.0.dist-info"
    needs = "".join(f"Requires-Dist: {line}\n" for line in requires)
    files = {
        f"{name}.py": f"TAG = {tag!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in files)
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-1.0-{tag}.whl", "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)


@pytest.fixture
def command(tmp_path: Path, checkout: Path) -> Path:
    """requirements/overlay.py beside requirements of its own, which the wheels in `wheels` meet."""
    folder = tmp_path / "requirements"
    folder.mkdir()
    shutil.copy(checkout / "requirements" / "overlay.py", folder)
    (folder / "job.txt").write_text("# All of it.\nalpha[fast]\n")
    (folder / "torch.txt").write_text("tensors==1.0\n")
    (folder / "server.txt").write_text("server==1.0\n")
    pins = ("alpha", "old ; python_full_version < '3.11'", "old_or_new", "fast", "compiled")
    lines = [f"{name.split()[0]}==1.0{name.partition(' ')[2]}\n" for name in pins]
    (folder / "constraints.txt").write_text("".join(lines))
    (folder / "constraints-dev.txt").write_text("")
    wheels = tmp_path / "wheels"
    make_wheel(
        wheels,
        "alpha",
        [
            "Old_Or.New",
            'old; python_version < "3.11"',
            'fast; extra == "fast"',
            'slow; extra == "slow"',
            'windows; sys_platform == "win32"',
        ],
    )
    make_wheel(wheels, "old_or_new", ["compiled>=0.5"])
    for name in ("old", "fast", "more"):
        make_wheel(wheels, name)
    for version in ("310", "311"):
        for machine in ("x86_64", "aarch64"):
            tag = f"cp{version}-cp{version}-manylinux_2_17_{machine}"
            make_wheel(wheels, "compiled", tag=tag)
    make_wheel(wheels, "tensors", ["more==1.0"])
    make_wheel(wheels, "server", ["unwanted"])
    return folder / "overlay.py"


def run_overlay(command: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    wheels = command.parents[1] / "wheels"
    return subprocess.run(
        [sys.executable, str(command), *arguments],
        env={
            **os.environ,
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(wheels),
        },
        capture_output=True,
        text=True,
        check=False,
    )


def modules(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*.py")}


def test_a_folder_for_another_python(command: Path, tmp_path: Path) -> None:
    """What a package needs depends on the Python that it is for, not on the one that runs pip."""
    for python, old in (("3.10", {"old"}), ("3.11", set())):
        folder = tmp_path / f"for {python}"
        ran = run_overlay(command, "--python", python, "--machine", "aarch64", str(folder))
        assert ran.returncode == 0, ran.stderr
        assert f"cluster.overlay={folder}" in ran.stdout
        assert modules(folder) == {"alpha", "old_or_new", "fast", "compiled"} | old
        tag = f"cp{python.replace('.', '')}"
        assert f"{tag}-{tag}-manylinux_2_17_aarch64" in (folder / "compiled.py").read_text()
        values = json.loads((folder / "overlay.json").read_text())
        assert (values["python"], values["machine"]) == (python, "aarch64")
        assert "alpha-1.0-py3-none-any.whl" in values["wheels"]
    assert not list(tmp_path.glob("for *.*.*"))


def test_torch_comes_with_its_needs_and_the_server_without(command: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    extras = ("--with", "torch", "--with", "server")
    ran = run_overlay(command, "--python", "3.11", "--machine", "x86_64", *extras, str(folder))
    assert ran.returncode == 0, ran.stderr
    assert {"tensors", "more", "server"} <= modules(folder)


def test_a_wheel_with_another_hash_is_refused(command: Path, tmp_path: Path) -> None:
    locked = command.parent / "constraints.txt"
    wheel = tmp_path / "wheels" / "fast-1.0-py3-none-any.whl"
    right = hashlib.sha256(wheel.read_bytes()).hexdigest()
    pins = locked.read_text()
    for digest, code in ((right, 0), ("0" * 64, 1)):
        hashed = f"fast==1.0 \\\n    --hash=sha256:{'1' * 64} \\\n    --hash=sha256:{digest}"
        locked.write_text(pins.replace("fast==1.0", hashed))
        ran = run_overlay(command, "--python", "3.11", str(tmp_path / f"folder {code}"))
        assert ran.returncode == code, ran.stderr
    assert "DO NOT MATCH THE HASHES" in ran.stderr


def test_a_folder_that_is_there_is_left(command: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    ran = run_overlay(command, "--python", "3.10", str(tmp_path / "folder"))
    assert (ran.returncode, list((tmp_path / "folder").iterdir())) == (1, [])
    assert "is there; name a new folder" in ran.stderr


@pytest.mark.parametrize(
    ("python", "constraints", "says"),
    [
        ("3.12", None, "No matching distribution found for compiled==1.0"),
        ("3.11", "alpha==1.0\n", "old-or-new is not in requirements/constraints.txt"),
    ],
)
def test_a_folder_that_cannot_be_made(
    command: Path, tmp_path: Path, python: str, constraints: str | None, says: str
) -> None:
    if constraints is not None:
        (command.parent / "constraints.txt").write_text(constraints)
    ran = run_overlay(command, "--python", python, str(tmp_path / "folder"))
    assert ran.returncode == 1
    assert says in ran.stderr and "Traceback" not in ran.stderr
    assert not list(tmp_path.glob("folder*"))


def run_step(
    checkout: Path, step: str, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """A step on a Python that has nothing but the standard library."""
    return subprocess.run(
        [sys.executable, "-S", "-m", f"launcher_scripts.steps.{step}", *arguments],
        env={"PYTHONPATH": str(checkout), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("step", STEPS)
def test_a_step_says_in_one_line_what_is_missing(checkout: Path, step: str) -> None:
    ran = run_step(checkout, step, "--settings", "absent.yaml")
    assert ran.returncode == 3 and ran.stdout == ""
    (line,) = ran.stderr.splitlines()
    assert line.startswith(f"error: {step}: {sys.executable} (Python 3.")
    assert "numpy" in line and "yaml" in line and "cluster.overlay" in line
    assert f"python3 {checkout}/requirements/overlay.py --python 3." in line
    assert ("--with torch" in line) == (step in ("start_server", "measure_twin"))


def test_a_folder_for_another_python_is_named(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "overlay.json").write_text('{"python": "3.9"}')
    ran = run_step(checkout, STEPS[0], PYTHONPATH=f"{checkout}:{tmp_path}")
    assert ran.returncode == 3
    (line,) = ran.stderr.splitlines()
    assert f"the packages in {tmp_path} are for another Python; got Python 3.9" in line


def test_a_python_that_is_too_old(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 8, 10))
    with pytest.raises(SystemExit, match="3"):
        packages.check_packages("convert_checkpoint")
    printed = capsys.readouterr()
    assert "error: convert_checkpoint needs Python 3.10 or later" in printed.err
    assert printed.out == ""


def test_the_first_step_looks_for_what_later_ones_need(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda name: name != "torch" or None)
    packages.check_packages("convert_checkpoint")
    monkeypatch.setenv(LATER_STEPS, "start_server,judge")
    with pytest.raises(SystemExit, match="3"):
        packages.check_packages("convert_checkpoint")
    error = capsys.readouterr().err
    assert error.startswith("error: convert_checkpoint: ") and " does not have torch; " in error
    assert "--with torch" in error


@pytest.mark.parametrize("file", ["common/packages.py", *(f"steps/{step}.py" for step in STEPS)])
def test_an_old_python_reads_what_says_so(checkout: Path, file: str) -> None:
    text = (checkout / "launcher_scripts" / file).read_text(encoding="utf-8")
    assert ast.parse(text, feature_version=(3, 8))


def test_what_only_costs_time_is_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packages.note_slow_checksums()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(packages, "SAVE_TIME", ("absent_module", "zlib_ng"))
    packages.note_slow_checksums()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("note: without absent_module the standard library computes")


def needs_of(names: Iterable[str]) -> dict[str, Distribution]:
    """Installed packages and what they depend on, by name."""
    found: dict[str, Distribution] = {}
    waiting = [Requirement(name) for name in names]
    while waiting:
        wanted = waiting.pop()
        key = wanted.name.lower().replace("-", "_")
        package = found.setdefault(key, distribution(wanted.name))
        for entry in map(Requirement, package.requires or ()):
            extras = [
                entry.marker is None or entry.marker.evaluate({"extra": extra})
                for extra in (*wanted.extras, "")
            ]
            if any(extras) and (entry.name.lower().replace("-", "_") not in found or entry.extras):
                waiting.append(entry)
    return found


def link_packages(packages: Iterable[Distribution], folder: Path) -> None:
    """Have `folder` hold the packages, without installing them anew."""
    folder.mkdir(exist_ok=True)
    for package in packages:
        tops = {file.parts[0] for file in package.files or () if file.parts[0] != ".."}
        for top in tops - {"__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(package.locate_file(top))))


@pytest.mark.slow
def test_a_stock_python_does_the_whole_job(checkout: Path, tmp_path: Path) -> None:
    """It has torch and the server alone, as images do; the folder of packages has the rest."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "stock"], check=True)
    python = tmp_path / "stock" / "bin" / "python3"
    (site,) = (tmp_path / "stock").glob("lib/python3.*/site-packages")
    torch = needs_of(["torch"])
    link_packages([*torch.values(), distribution("nvidia-pytriton")], site)
    text = (checkout / "requirements" / "job.txt").read_text()
    job = needs_of([line for line in text.splitlines() if not line.startswith("#")])
    link_packages((job[name] for name in job.keys() - torch.keys()), tmp_path / "packages")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    (tmp_path / "packages" / "overlay.json").write_text(json.dumps({"python": version}))
    (tmp_path / "job").mkdir()
    with pytest.raises(subprocess.CalledProcessError):
        run_whole_job(tmp_path / "job", python)
    (log,) = (tmp_path / "job").rglob("log-*.out")
    assert "does not have gguf, numpy, yaml; name an interpreter that has them" in log.read_text()
    (tmp_path / "with").mkdir()
    report = run_whole_job(
        tmp_path / "with", python, options={"cluster.overlay": tmp_path / "packages"}
    )
    assert len(report["tasks"]["lambada"]["items"]) == len(WORDS)
