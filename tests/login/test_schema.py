"""Typed objects from plain mappings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.common.errors import ConfigError, Problems, problem
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.config.evaluation import BenchmarkSettings, TaskSettings
from launcher_scripts.config.export import TokenizerSettings
from launcher_scripts.config.options import build, check_options, option
from launcher_scripts.config.settings import (
    DeploySettings,
    EvaluateSettings,
    ExportSettings,
    read_settings,
    settings_text,
    write_settings,
)


@dataclass(frozen=True)
class Inner:
    size: int
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ConfigError(problem("size is negative", got=self.size))


@dataclass(frozen=True)
class Outer:
    text: str
    inner: Inner
    ratio: float = 1.0
    flag: bool = False
    pair: tuple[int, str] | None = None
    either: bool | int = 0
    table: Mapping[str, Inner | None] | None = None
    anything: Any = None


GOOD = {"text": "x", "inner": {"size": 1}}


def test_nested_values() -> None:
    built = build(
        Outer,
        {
            **GOOD,
            "ratio": 2,
            "pair": [1, "b"],
            "either": True,
            "table": {"a": {"size": 2, "names": ["n"]}, "b": None},
            "anything": [1],
        },
        "the test",
    )
    assert built == Outer(
        "x", Inner(1), 2.0, False, (1, "b"), True, {"a": Inner(2, ("n",)), "b": None}, [1]
    )


def test_a_name_of_digits_is_text() -> None:
    assert build(Outer, {**GOOD, "text": 126}, "the test").text == "126"


@pytest.mark.parametrize(
    ("values", "answer"),
    [
        ("text", "the content must be a mapping; got 'text'"),
        ({"text": "x"}, "missing key top.inner"),
        ({**GOOD, "txt": 1}, "unknown key top.txt; choices: anything, either, flag, inner"),
        ({**GOOD, "text": 1.5}, "top.text must be text; got 1.5"),
        ({**GOOD, "text": True}, "top.text must be text; got True"),
        ({**GOOD, "flag": 1}, "top.flag must be True or False; got 1"),
        ({**GOOD, "ratio": "half"}, "top.ratio must be a number; got 'half'"),
        ({**GOOD, "either": "no"}, "top.either must be a whole number; got 'no'"),
        ({**GOOD, "pair": [1]}, "top.pair must have 2 members; got [1]"),
        ({**GOOD, "pair": "1,b"}, "top.pair must be a list; got '1,b'"),
        ({**GOOD, "table": [1]}, "top.table must be a mapping; got [1]"),
        ({**GOOD, "table": {"a": {"size": "x"}}}, "top.table.a.size must be a whole number"),
        ({**GOOD, "inner": {"size": 1, "names": [True]}}, "top.inner.names[0] must be text"),
        ({**GOOD, "inner": {"size": -1}}, "size is negative; got -1"),
    ],
)
def test_every_mistake_is_named(values: Any, answer: str) -> None:
    key = "" if values == "text" else "top"
    with pytest.raises(ConfigError) as raised:
        build(Outer, values, "the test", key=key)
    assert str(raised.value).startswith("1 problem in the test:\n- ")
    assert answer in str(raised.value)


def test_all_mistakes_come_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        build(Outer, {"inner": {"size": "x"}, "flag": 3, "other": 1}, "the test")
    assert len(raised.value.problems) == 4


@pytest.mark.parametrize(
    "settings",
    [
        ExportSettings(
            *("m", "gpt3", "/a b/ü.nemo", "/r/m"),
            parallelism=Parallelism(4, 2),
            tokenizer=TokenizerSettings("files", vocab_file="/v", merge_file="/m", end_id=3),
        ),
        DeploySettings("/repository", "/results", http_port=0, ready_timeout=5),
        EvaluateSettings(
            *("/ready.json", "/results", "m", "/tokenizer"),
            tasks=(TaskSettings("lambada", "/data\n$(x)", 5),),
            benchmark=BenchmarkSettings((1, 8), ((60, 20), (200, 200))),
        ),
    ],
)
def test_settings_are_read_as_they_were_written(tmp_path: Path, settings: Any) -> None:
    path = tmp_path / "job_hydra.yaml"
    write_settings(settings, path)
    assert read_settings(type(settings), path) == settings
    assert list(tmp_path.iterdir()) == [path]


def test_a_settings_file_begins_with_what_has_no_default() -> None:
    text = settings_text(
        EvaluateSettings("/ready.json", "/r", "m", "/t", (TaskSettings("boolq", "/d"),))
    )
    assert text.startswith("ready_file: /ready.json\nresults_dir: /r\nmodel_name: m\n")


@dataclass(frozen=True)
class Limited:
    count: int | None = option(None, "how many", lower=1)
    kind: str = option("a", "which", choices=("a", "b"))


def test_the_limits_of_options_are_checked() -> None:
    problems = Problems("the test")
    check_options(Limited(), problems, "block.{}".format)
    assert problems.messages == []
    check_options(Limited(0, "c"), problems, "block.{}".format)
    assert problems.messages == [
        "count must be at least 1; got 0; change block.count",
        "unknown kind; got 'c'; choices: a, b; change block.kind",
    ]


@pytest.mark.parametrize("content", [None, "a: [", "- 1", "model_name: x"])
def test_a_broken_settings_file_is_named(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "job_hydra.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"job_hydra\.yaml"):
        read_settings(DeploySettings, path)
