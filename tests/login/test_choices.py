"""Choices of conf/ on the command line: what is answered, and what is left to Hydra."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from launcher_scripts.common.errors import ConfigError
from stages.choices import (
    check_choices,
    check_grammar,
    normalized_arguments,
    with_texts_of_variables,
)
from tests.login.conftest import Run


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    for name in ("export/gpt3/small", "export/t5/large", "cluster_type/bcm"):
        file = tmp_path / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return tmp_path


def test_every_wrong_choice_is_answered(conf: Path) -> None:
    with pytest.raises(ConfigError, match="2 problems") as caught:
        check_choices(["export=gpt3/large", "cluster_type=slurm", "stages=[export]"], conf)
    text = str(caught.value)
    assert "unknown export; got 'gpt3/large'; choices: gpt3/small, t5/large" in text
    assert "unknown cluster_type; got 'slurm'; choices: bcm" in text


@pytest.mark.parametrize("nothing", ["", "null"])
def test_a_group_always_has_a_choice(nothing: str, conf: Path) -> None:
    with pytest.raises(ConfigError, match=f"unknown export; got '{nothing}'; choices: gpt3/small"):
        check_choices([f"export={nothing}"], conf)


@pytest.mark.parametrize(
    "argument",
    [
        "export=gpt3/small",
        "export=t5/large.yaml",
        "cluster_type@here=bcm",
        "~export",
        "+more=export",
        "export.model.tokenizer=none",
        "export=${choice}",
        "export=gpt3/small,t5/large",
    ],
)
def test_what_is_right_or_not_ours_passes(argument: str, conf: Path) -> None:
    check_choices([argument], conf)


def test_other_folders_may_hold_choices(conf: Path) -> None:
    check_choices(["--config-dir=/elsewhere", "export=mine"], conf)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("export.model.checkpoint_path=~/m.nemo", "'export.model.checkpoint_path=\"~/m.nemo\"'"),
        ("base_results_dir=/a b=c/ä", "'base_results_dir=\"/a b=c/ä\"'"),
        ("stages=[export", "stages=[A,B]', with every bracket closed"),
        ("=3", "change the key"),
    ],
)
def test_a_value_that_needs_quotes_is_answered_with_them(argument: str, change: str) -> None:
    with pytest.raises(ConfigError, match="1 problem") as caught:
        check_grammar(["dry_run=True", argument])
    assert f"cannot read this as key=value; got {argument!r}; change" in str(caught.value)
    assert change in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        ["stages=[export,deploy]", "a.b='~/x y=z'", "+c.d={e: 1}", "~export", "f="],
        ["-m", "a=1,2", "b=range(1,3)"],
        ["--config-dir=/a=b~", "-cd", "/a=b~", "-sc", "query=bash", "--cfg", "job"],
    ],
)
def test_what_hydra_reads_passes(arguments: list[str]) -> None:
    check_grammar(arguments)


def test_a_former_name_of_a_task_is_renamed_with_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "evaluate=t5/boolq",
        "evaluate.tasks.boolq.limit=5",
        "+evaluate.tasks.boolq={data_file: /boolq}",
        "evaluate.harness.tasks=[boolq]",
        "evaluate.model_name=boolq",
    ]
    assert normalized_arguments(given) == [
        "evaluate=t5/boolq_generate",
        "evaluate.tasks.boolq_generate.limit=5",
        "+evaluate.tasks.boolq_generate={data_file: /boolq}",
        *given[3:],
    ]
    (note,) = capsys.readouterr().err.splitlines()
    assert note == "note: the task boolq is called boolq_generate (docs/evaluation.md)"
    assert normalized_arguments(given[3:]) == given[3:] and not capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        (["stages=export,deploy"], ["stages=[export,deploy]"]),
        (["stages=export, deploy"], ["stages=[export,deploy]"]),
        (["stages=export deploy"], ["stages=[export,deploy]"]),
        (["stages=[export,", "deploy]", "a=b"], ["stages=[export, deploy]", "a=b"]),
        (["evaluate.ladder=[fp32,", "bf16,", "int8]"], ["evaluate.ladder=[fp32, bf16, int8]"]),
        (["stages=[export,"], ["stages=[export,"]),
        (["cluster_type=slurm"], ["cluster_type=bcm"]),
        (["cluster_type=local"], ["cluster_type=interactive"]),
        (["a='[b'", "--cfg", "job"], ["a='[b'", "--cfg", "job"]),
    ],
)
def test_what_a_shell_makes_of_a_list_is_read(typed: list[str], read: list[str]) -> None:
    assert normalized_arguments(typed) == read


# Texts that YAML 1.1 or Hydra read as a number or a truth value.
CHANGED = ("on", "Off", "no", "true", "010", "0x10", "0b1", "1_000", "1:30", "1e3", "1.50", ".5")


def test_variables_are_the_text_of_the_file(run: Run, arguments: list[str], tmp_path: Path) -> None:
    more = tmp_path / "conf" / "more" / "site.yaml"
    more.parent.mkdir(parents=True)
    lines = [f"  V{number}: {text}" for number, text in enumerate(CHANGED)]
    limit = "deploy: {run: {time_limit: 1:30:00}}"
    unset = ["  NONE: null", "  EMPTY:", "  QUOTED: '010'"]
    more.write_text("\n".join(["# @package _global_", "env_vars:", *lines, *unset, limit]))
    ran = run(
        *(f"--config-dir={more.parents[1]}", "+more=site", "cluster_type=bcm", *arguments),
        *("dry_run=True", "stages=[export,deploy]", "cluster.account=0123"),
    )
    assert ran.returncode == 0, ran.stderr
    script = ran.stdout.splitlines()
    for number, text in enumerate(CHANGED):
        assert f"export V{number}={text}" in script
    assert not [line for line in script if line.startswith(("export NONE", "export EMPTY"))]
    assert {"export QUOTED=010", "#SBATCH --time=1:30:00", "#SBATCH --account=0123"} <= {*script}


def test_variables_are_the_text_of_the_command_line(run: Run, arguments: list[str]) -> None:
    texts = [*CHANGED, "TRUE", "inf", "19"]
    variables = [f"+env_vars.V{number}={text}" for number, text in enumerate(texts)]
    ran = run("stages=[export]", *arguments, *variables, "cluster_type=bcm", "dry_run=True")
    assert ran.returncode == 0, ran.stderr
    for number, text in enumerate(texts):
        assert f"export V{number}={text}" in ran.stdout.splitlines()


@pytest.mark.parametrize("text", ["true", "1e3", "1_000"])
def test_a_mapping_of_variables_asks_for_quotes(text: str) -> None:
    with pytest.raises(ConfigError, match="put each in quotes"):
        with_texts_of_variables([f"env_vars={{A: {text}}}"])
    written = ["env_vars={A: 19, B: True, C: 'on', D: null}", "stages=[export]", "+env_vars.A=x"]
    assert with_texts_of_variables(written) == written


AWKWARD = (
    *("a=b", "it's", 'say "x"', r"a\b=c", "ends=\\", r"a\"b", "~x", "{a", "ünï=", "x y=z", '"'),
    *("$HOME=`ls`", "'a'=b", r'a\\"b='),
)


@pytest.mark.parametrize("value", [*AWKWARD, "[--a=b]", "[~a, b=c]"])
def test_advice_about_quotes_can_be_followed(value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_grammar([f"cluster.comment={value}", "+a=b=c"])
    advice = caught.value.problems[0].partition("change it to ")[2]
    (argument,) = shlex.split(advice)
    check_grammar([argument])
    read = OverridesParser.create().parse_override(argument).value()
    expected = [item.strip() for item in value[1:-1].split(",")] if value[0] == "[" else value
    assert [getattr(item, "text", item) for item in (read if type(read) is list else [read])] == (
        expected if isinstance(expected, list) else [expected]
    )
