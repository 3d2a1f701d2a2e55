"""Pinned packages: each requirement has a pin, each pin its hashes and its licence."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).parents[1] / "requirements"
LOCKS = ("constraints.txt", "constraints-dev.txt")
HASHED = (*LOCKS, "server.txt", "no-deps.txt")
LEFT_OUT = re.compile(r"torch|triton|nvidia-|cuda-")  # so that a machine's own torch can serve


def entries(name: str) -> dict[str, list[tuple[Requirement, list[str]]]]:
    """Package -> its entries in a file of requirements/, each with its hashes."""
    text = (FOLDER / name).read_text(encoding="utf-8").replace("\\\n", "")
    found: dict[str, list[tuple[Requirement, list[str]]]] = {}
    for line in text.splitlines():
        said, *hashes = line.partition("#")[0].split("--hash=")
        if said.strip():
            requirement = Requirement(said)
            name = canonicalize_name(requirement.name)
            found.setdefault(name, []).append((requirement, [each.strip() for each in hashes]))
    return found


@pytest.mark.parametrize("name", HASHED)
def test_every_pin_is_exact_and_has_hashes(name: str) -> None:
    for pins in entries(name).values():
        for requirement, hashes in pins:
            assert [part.operator for part in requirement.specifier] == ["=="], requirement
            assert hashes, requirement
            assert all(re.fullmatch("sha256:[0-9a-f]{64}", each) for each in hashes), requirement


@pytest.mark.parametrize(
    ("name", "locks"),
    [
        *((name, LOCKS[:1]) for name in ("login.txt", "job.txt", "quickstart.txt")),
        *((name, LOCKS) for name in ("dev.txt", "sign.txt")),
    ],
)
@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_every_requirement_is_met_by_a_pin(name: str, locks: tuple[str, ...], python: str) -> None:
    here = {"python_version": python, "python_full_version": f"{python}.0"}
    pins = {
        package: [entry for entry, _ in found if not entry.marker or entry.marker.evaluate(here)]
        for lock in locks
        for package, found in entries(lock).items()
    }
    for package, wanted in entries(name).items():
        for requirement, _ in wanted:
            if requirement.marker and not requirement.marker.evaluate(here):
                continue
            (pin,) = pins[package]
            (version,) = (part.version for part in pin.specifier)
            assert requirement.specifier.contains(version), (python, requirement, str(pin))


def test_no_package_is_pinned_in_both_files() -> None:
    first, second = (
        {str(entry) for found in entries(lock).values() for entry, _ in found} for lock in LOCKS
    )
    assert not first & second
    assert not [name for name in {*first, *second} if LEFT_OUT.fullmatch(name.partition("=")[0])]


def test_every_pinned_package_has_a_known_licence() -> None:
    with (FOLDER / "licences.csv").open(encoding="utf-8", newline="") as file:
        licences = dict(csv.reader(file))
    names = {name for file in (*HASHED, "torch.txt", "triton.txt") for name in entries(file)}
    assert sorted(names - licences.keys()) == [], "make licences"
    assert not [name for name, said in licences.items() if said.strip().upper() in ("", "UNKNOWN")]
    # A list that pip-licenses would warn of: what may not be shipped with an Apache-2.0 program.
    copyleft = re.compile(r"\b(A?GPL|GNU (Affero )?General)", re.IGNORECASE)
    assert not [name for name, said in licences.items() if copyleft.search(said)]


def test_the_list_of_materials_has_every_package(tmp_path: Path) -> None:
    pytest.importorskip("cyclonedx_py")
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-file"]
    subprocess.run([*command, tmp_path / "sbom.json", sys.executable], check=True)
    document = json.loads((tmp_path / "sbom.json").read_text(encoding="utf-8"))
    assert document["bomFormat"] == "CycloneDX"
    found = {canonicalize_name(part["name"]): part for part in document["components"]}
    here = {canonicalize_name(each.metadata["Name"]): each.version for each in distributions()}
    assert {name: part["version"] for name, part in found.items()} == here
