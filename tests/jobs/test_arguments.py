"""Options of the jobs command that no command could act on."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher_scripts.jobs.__main__ import main


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["status", "--watch", "-1"], "argument -w/--watch: must be a number of seconds: -1"),
        (["status", "--watch", "nan"], "argument -w/--watch: must be a number of seconds: nan"),
        (["wait", "--timeout", "nan", "x"], "argument --timeout: must be a number of seconds"),
        (
            ["wait", "--timeout", "soon", "x"],
            "argument --timeout: must be a number of seconds: soon",
        ),
        (["logs", "-n", "-1", "x"], "argument -n/--lines: must be a whole number: -1"),
        (["logs", "-n", "all", "x"], "argument -n/--lines: must be a whole number: all"),
    ],
)
def test_a_wrong_option_is_named(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([arguments[0], f"--results={tmp_path}", *arguments[1:]])
    assert ended.value.code == 3
    assert says in capsys.readouterr().err
