"""Links, named modules and the index of the documents lead to what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")])
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
ANCHOR = re.compile(r'<a id="([^"]+)">')
MODULE = re.compile(r"`((?:\w+/)+\w+\.py)`")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub gives a document's headings, and those that it names itself."""
    text = FENCED.sub("", document.read_text("utf-8"))
    slugs = (
        re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-")
        for title in HEADING.findall(text)
    )
    return {*slugs, *ANCHOR.findall(text)}


def broken(document: Path) -> list[str]:
    """The relative links of a document that lead nowhere."""
    wrong = []
    for link in LINK.findall(FENCED.sub("", document.read_text("utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    assert broken(document) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_tests_that_are_named_exist(document: Path) -> None:
    missing = [
        f"{file}::{test}"
        for file, test in TEST.findall(document.read_text("utf-8"))
        if not (ROOT / file).is_file()
        or not re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text("utf-8"), re.MULTILINE)
    ]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_modules_that_are_named_exist(document: Path) -> None:
    named = MODULE.findall(document.read_text("utf-8"))
    missing = [
        name
        for name in named
        for parent in (ROOT, ROOT / "launcher_scripts")
        if (parent / name.split("/")[0]).is_dir() and not (parent / name).exists()
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("word", "rooms"),
    [
        ("checkpoint_path", (".",)),
        ("input_ids", ("contract", "backends", "engine")),
    ],
)
def test_architecture_names_the_files_that_know_a_walks_value(
    word: str, rooms: tuple[str, ...]
) -> None:
    text = (DOCS / "architecture.md").read_text("utf-8")
    section = text.partition("## Where the two names stand")[2]
    paragraph = next(part for part in section.split("\n\n") if f"`{word}`" in part)
    launcher = ROOT / "launcher_scripts"
    knows = re.compile(rf"\b{word}\b")
    files = {
        path.relative_to(launcher).as_posix()
        for room in rooms
        for path in (launcher / room).rglob("*.py")
        if knows.search(path.read_text("utf-8"))
    }
    named = {name for name in MODULE.findall(paragraph) if not name.startswith("stages/")}
    assert named == files


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("# A title: here\n[a](#a-title-here) [b](#b) [c](c.md) [d](https://d)\n")
    assert broken(document) == ["#b", "c.md"]


def test_the_index_names_every_document() -> None:
    index = set(LINK.findall((DOCS / "README.md").read_text("utf-8")))
    others = {path.name for path in DOCS.glob("*.md")} - {"README.md"}
    assert sorted(others - index) == []
