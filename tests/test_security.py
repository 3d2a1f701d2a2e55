"""SECURITY.md and vex.json are made of docs/vulnerabilities.yaml, and every named test exists.

`pytest tests/test_security.py --update-golden` writes both anew.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SOURCE = yaml.safe_load((ROOT / "docs" / "vulnerabilities.yaml").read_text(encoding="utf-8"))
STATEMENTS: dict[str, dict[str, Any]] = SOURCE["statements"]
FOUND: dict[str, list[dict[str, Any]]] = SOURCE["vulnerabilities"]
ALL = [entry for group in FOUND.values() for entry in group]
PRODUCT = "pkg:generic/nemo-deployment-launcher"
SERVER = "pkg:pypi/nvidia-pytriton"
BEGIN, END = "<!-- made of docs/vulnerabilities.yaml -->\n", "<!-- end -->\n"
WORDS = {"fixed": "fixed", "affected": "affected", "not_affected": "not affected"}
# OpenVEX 0.2.0, section "Status Justifications".
JUSTIFICATIONS = {
    "component_not_present",
    "vulnerable_code_not_present",
    "vulnerable_code_not_in_execute_path",
    "vulnerable_code_cannot_be_controlled_by_adversary",
    "inline_mitigations_already_exist",
}


def address(name: str) -> str:
    """The page of a CVE or of a GitHub advisory."""
    if name.startswith("CVE-"):
        return f"https://www.cve.org/CVERecord?id={name}"
    return f"https://github.com/advisories/{name}"


def tables() -> str:
    """What stands in SECURITY.md: the reasons, then a table of each group."""
    lines = ["### Reasons\n"]
    for name, said in STATEMENTS.items():
        tests = ", ".join(f"`{test}`" for test in said["tests"])
        action = f" **Do:** {said['action']}" if "action" in said else ""
        lines.append(
            f"- **{name}** ({WORDS[said['status']]}): {said['why']}{action} Tried by {tests}."
        )
    for group, entries in FOUND.items():
        lines += [f"\n### {group}\n", "| number | what | fixed in | this project | reason |"]
        lines.append("|---|---|---|---|---|")
        for entry in entries:
            number = f"[{entry['id']}]({address(entry['id'])})"
            what = f"{entry['of']}: {entry['what']}" if "of" in entry else entry["what"]
            status = WORDS[STATEMENTS[entry["statement"]]["status"]]
            cells = (number, what, entry.get("fixed", "-"), status, entry["statement"])
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def vex() -> str:
    """The same in OpenVEX: https://github.com/openvex/spec."""
    of_server = {entry["id"] for entry in FOUND["Triton"]}
    statements = []
    for entry in ALL:
        said = STATEMENTS[entry["statement"]]
        product: dict[str, Any] = {"@id": PRODUCT}
        if entry["id"] in of_server:
            product["subcomponents"] = [{"@id": SERVER}]
        values = {
            "vulnerability": {"@id": address(entry["id"]), "name": entry["id"]},
            "products": [product],
            "status": said["status"],
        }
        if "justification" in said:
            values["justification"] = said["justification"]
        kind = "status_notes" if said["status"] != "not_affected" else "impact_statement"
        values[kind] = f"{said['why']} Tried by {', '.join(said['tests'])}."
        if "action" in said:
            values["action_statement"] = said["action"]
        statements.append(values)
    document = {
        "@context": "https://openvex.dev/ns/v0.2.0",
        "@id": "https://openvex.dev/docs/public/nemo-deployment-launcher",
        "author": "The maintainers of nemo-deployment-launcher",
        "timestamp": SOURCE["updated"],
        "version": 1,
        "statements": statements,
    }
    return json.dumps(document, indent=1) + "\n"


def test_both_documents_are_made_of_the_table(request: pytest.FixtureRequest) -> None:
    security, file = ROOT / "SECURITY.md", ROOT / "vex.json"
    before, _, rest = security.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    right = before + BEGIN + "\n" + tables() + "\n" + END + after
    if request.config.getoption("--update-golden"):
        security.write_text(right, encoding="utf-8")
        file.write_text(vex(), encoding="utf-8")
    assert security.read_text(encoding="utf-8") == right, "run it with --update-golden"
    assert file.read_text(encoding="utf-8") == vex(), "run it with --update-golden"


def test_every_statement_is_complete() -> None:
    for name, said in STATEMENTS.items():
        assert said["status"] in WORDS, name
        assert ("justification" in said) == (said["status"] == "not_affected"), name
        assert ("action" in said) == (said["status"] == "affected"), name
        assert said.get("justification", "component_not_present") in JUSTIFICATIONS, name
        assert said["tests"], name
    used = {entry["statement"] for entry in ALL}
    assert used == STATEMENTS.keys()
    names = [entry["id"] for entry in ALL]
    assert len(names) == len(set(names))
    pattern = re.compile(r"CVE-20\d\d-\d{4,}|GHSA(-[2-9cfghjmpqrvwx]{4}){3}")
    assert all(map(pattern.fullmatch, names))


def test_every_named_test_exists() -> None:
    for name in sorted({test for said in STATEMENTS.values() for test in said["tests"]}):
        path, _, function = name.partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        assert function in {item.name for item in tree.body if isinstance(item, kinds)}, name


def releases() -> dict[str, str]:
    """Use -> monthly release, of the table in docs/containers.md."""
    text = (ROOT / "docs" / "containers.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (oldest|pip installs|recommended) \| (\d\d\.\d\d) \|", text, re.MULTILINE
    )
    return dict(rows)


def test_what_is_fixed_is_in_the_release_that_pip_installs() -> None:
    ours = releases()["pip installs"]
    for entry in FOUND["Triton"]:
        assert (entry["fixed"] <= ours) == (entry["statement"] == "fixed"), entry["id"]


def test_the_recommended_release_has_every_fix() -> None:
    assert all(entry["fixed"] <= releases()["recommended"] for entry in FOUND["Triton"])


def test_the_server_that_pip_installs_has_one_backend() -> None:
    """The package of requirements/server.txt, whose release docs/containers.md names."""
    server = (ROOT / "requirements" / "server.txt").read_text(encoding="utf-8")
    text = (ROOT / "docs" / "containers.md").read_text(encoding="utf-8")
    (version,) = re.findall(r"^nvidia-pytriton==(\S+)", server, re.MULTILINE)
    assert f"nvidia-pytriton {version}" in text
    package = importlib.util.find_spec("pytriton")
    if package is None or not package.submodule_search_locations:
        pytest.skip("nvidia-pytriton is not installed")
    root = Path(package.submodule_search_locations[0]) / "tritonserver"
    assert [path.name for path in (root / "backends").iterdir()] == ["python"]
