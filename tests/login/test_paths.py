"""The paths of a configuration: found by their type, wherever they stand in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher_scripts.config.options import (
    ConfigPath,
    NamedPath,
    SecretPath,
    paths_in,
    with_absolute_paths,
)


@dataclass(frozen=True)
class Block:
    key: SecretPath | None = None
    text: str = "notes"


@dataclass(frozen=True)
class Settings:
    file: ConfigPath
    more: tuple[ConfigPath, ...] = ()
    block: Block | None = None
    blocks: tuple[Block, ...] = ()


def test_paths_become_absolute_and_other_text_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/users/me")
    given = Settings("a/../b", ("~/c", "/d"), Block("e"), (Block(), Block("f", "notes/g")))
    assert with_absolute_paths(given) == Settings(
        f"{tmp_path}/b",
        ("/users/me/c", "/d"),
        Block(f"{tmp_path}/e"),
        (Block(), Block(f"{tmp_path}/f", "notes/g")),
    )


def test_paths_have_the_names_of_their_fields() -> None:
    settings = Settings("/a", ("/b", "/c"), Block("/d"), (Block("/e"), Block()))
    assert list(paths_in(settings)) == [
        NamedPath("file", "/a"),
        NamedPath("more", "/b"),
        NamedPath("more", "/c"),
        NamedPath("block.key", "/d", private=True),
        NamedPath("blocks.key", "/e", private=True),
    ]
    assert list(paths_in(None)) == []
