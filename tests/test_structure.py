"""Figures of the code's structure and language, with limits that only fall.

A change that lowers a figure lowers its limit. A change that would raise one finds another way: a
table row instead of a file, a noun of the field instead of a participle.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.test_house import MODULES, ROOT, SOURCES, imported, module_name, ours, tree

# Of launcher_scripts and stages.
MAX_FILES = 370
MAX_SINGLE_IMPORTERS = 80
MAX_MARKERS = 6.9  # identifiers with a marker word, per 1,000 lines
MAX_OPENINGS = 1.1  # percent of the docstrings

# Participles and everyday words in names, where the field has nouns: see Words in CONTRIBUTING.md.
_MARKERS = """
found said given asked wanted told each most least own behind beside place places there whole
known what how held shown ended begun made taken kept chosen counted largest smallest usual ask
take give look refuse refused rest alone around inside onto nothing theirs ours figure reach
marks room pace patience facts news twin twins rung beat beats thought trouble
"""
MARKERS = frozenset(_MARKERS.split())
# Docstrings are imperative, or nouns.
OPENINGS = frozenset({"What", "Whether", "How", "Of", "Those", "Where", "Which", "That"})
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
COUNTED = [path for path in SOURCES if path != Path("main.py")]


def folder(path: Path) -> str:
    """The folder of a file, at most two levels below launcher_scripts."""
    parts = path.parts[:-1]
    inner = parts[1:3] if parts[:1] == ("launcher_scripts",) else parts[:2]
    return "/".join(inner or parts)


def identifiers(path: Path) -> Iterator[str]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, (ast.arg, ast.keyword)) and node.arg:
            yield node.arg
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name


def test_folders_import_each_other_in_one_direction() -> None:
    """Two levels deep: checkpoint/layout never imports checkpoint/sources, which imports it."""
    edges: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path in SOURCES:
        for module in filter(ours, imported(path)):
            ends = folder(path), folder(MODULES[module])
            if ends[0] != ends[1]:
                edges[ends].append(f"{path} imports {module}")
    mutual = [
        f"{one} and {other} import each other: {min(causes, edges[other, one], key=len)}"
        for (one, other), causes in edges.items()
        if one < other and (other, one) in edges
    ]
    assert not mutual, "\n".join(mutual)


def test_files_are_few() -> None:
    assert len(COUNTED) <= MAX_FILES


def test_few_files_have_one_importer_alone() -> None:
    """A file that one other needs is usually a part of it."""
    importers = Counter(
        module
        for path in SOURCES
        for module in {name for name in imported(path) if ours(name)} - {module_name(path)}
    )
    single = [module for module, count in importers.items() if count == 1]
    assert len(single) <= MAX_SINGLE_IMPORTERS


def test_names_are_of_the_field() -> None:
    marked = sum(
        any(word.lower() in MARKERS for word in WORD.findall(name))
        for path in COUNTED
        for name in identifiers(path)
    )
    lines = sum(len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in COUNTED)
    assert 1000 * marked / lines <= MAX_MARKERS


def test_docstrings_are_imperative_or_nouns() -> None:
    openings = [
        words[0].strip(".,:;") in OPENINGS
        for path in COUNTED
        for node in ast.walk(tree(path))
        if isinstance(node, DOCUMENTED) and (words := (ast.get_docstring(node) or "").split())
    ]
    assert 100 * sum(openings) / len(openings) <= MAX_OPENINGS
