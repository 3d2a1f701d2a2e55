"""Links, named modules and the index of the documents lead to what there is."""

from __future__ import annotations

import ast
import errno
import os
import re
from collections.abc import Iterator
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


def messages() -> Iterator[str]:
    """The texts of the program, with a null character for each value that is filled in."""
    rooms = ("launcher_scripts", "stages")
    for path in [
        ROOT / "main.py",
        *(file for room in rooms for file in (ROOT / room).rglob("*.py")),
    ]:
        nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                yield "".join(
                    getattr(part, "value", "\0") if isinstance(part, ast.Constant) else "\0"
                    for part in node.values
                )
            elif isinstance(node, ast.Constant) and id(node) not in docstrings:
                yield str(node.value)
    for template in (ROOT / "templates").glob("*.j2"):
        yield from template.read_text("utf-8").splitlines()
    yield os.strerror(errno.ENOSPC)


def indexed_messages() -> list[str]:
    """The parts of messages in the first column of the index of errors."""
    rows = re.findall(r"^\| (.+?) \| ", (DOCS / "errors.md").read_text("utf-8"), re.MULTILINE)
    cells = [row for row in rows if not row.startswith(("*", "message", "`error.code`", "---"))]
    return [part for cell in cells for part in re.split(r"[,;] (?:or )?", cell)]


def test_the_index_of_errors_has_messages_of_the_program() -> None:
    texts = list(messages())
    whole = set(texts)
    unknown = []
    for part in indexed_messages():
        if part.startswith("`"):
            found = part.strip("`") in whole
        else:
            pattern = re.compile(".*".join(re.escape(text.strip()) for text in part.split("...")))
            found = any(map(pattern.search, texts))
        if not found:
            unknown.append(part)
    assert unknown == []
    assert len(indexed_messages()) > 60


UNQUOTED = re.compile(
    r"(?:^|[\s`(])((?:[a-z_]+\.)*[a-z_]+=\[[^\s`'\"]*\])(?=[\s`.,;:)]|$)", re.MULTILINE
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_lists_on_command_lines_are_quoted(document: Path) -> None:
    """zsh takes a bracket for a pattern of file names."""
    assert UNQUOTED.findall(document.read_text("utf-8")) == []


def test_suggested_lists_are_quoted() -> None:
    """An error's advice is copied to the command line."""
    unquoted = []
    for path in [
        file for room in ("launcher_scripts", "stages") for file in (ROOT / room).rglob("*.py")
    ]:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.keyword) and node.arg in ("change", "choices"):
                texts = [n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)]
                unquoted += [text for text in texts if UNQUOTED.search(str(text))]
    assert unquoted == []


@pytest.mark.parametrize("name", ["README.md", "docs/first-model.md"])
def test_commands_can_be_pasted(name: str) -> None:
    """A terminal's zsh knows no comments."""
    blocks = FENCED.findall((ROOT / name).read_text("utf-8"))
    commands = [line for block in blocks for line in block.splitlines() if "#" in line]
    assert commands == []
