"""The quoting filters, and templates that lack a value."""

from __future__ import annotations

import subprocess
from pathlib import Path

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher_scripts.cluster import Cluster
from launcher_scripts.cluster.interactive import (
    BcpCluster,
    BcpOptions,
    InteractiveCluster,
    InteractiveOptions,
)
from launcher_scripts.cluster.job import Job, JobFolder, Step
from launcher_scripts.cluster.slurm import SlurmCluster, SlurmOptions
from launcher_scripts.common import rendering
from launcher_scripts.common.rendering import pbtxt, quote, quote_sbatch, render

NASTY = [
    "plain",
    "two words",
    "it's",
    'say "x"',
    "$(touch pwned)",
    "`touch pwned`",
    "$HOME ${PATH}",
    "a\nb",
    "ends in \\",
    "; rm -rf x",
    "*?[a]",
    "ünïcödé 模型",
    "-n",
    "",
    "#no comment",
    "!history",
    "~",
]


def printed(command: str) -> str:
    """What bash makes of a command, byte for byte."""
    result = subprocess.run(["bash", "-c", command], capture_output=True, check=True)
    return result.stdout.decode()


@pytest.mark.parametrize("value", NASTY)
def test_a_quoted_value_is_one_word(value: str) -> None:
    assert printed(f"printf '%s|' {quote(value)} end") == f"{value}|end|"


def test_sbatch_takes_a_backslash_for_an_escape_everywhere() -> None:
    assert quote_sbatch(r"a\b 'c'") == quote(r"a\\b 'c'")
    assert quote_sbatch("a b") == quote("a b")


CLUSTERS: tuple[Cluster, ...] = (
    SlurmCluster(SlurmOptions()),
    BcpCluster(BcpOptions()),
    InteractiveCluster(InteractiveOptions()),
)
SHOW = """
import os, sys
print([os.getcwd(), *sys.argv[1:], *(os.environ[n] for n in sys.argv if n.startswith("NASTY_"))])
"""


@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda cluster: cluster.type)
def test_scripts_hand_every_value_to_the_step_unchanged(
    calls: Path, tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    root = tmp_path / "a $(touch pwned) 'folder'"
    root.mkdir()
    env = {f"NASTY_{number}": value for number, value in enumerate(NASTY)}
    step = Step("show", ("python3", "-c", SHOW, *NASTY, *env))
    job = Job("export", JobFolder(root, "job"), None, (step, step), env=env)
    assert printed(cluster.render(job)) == f"{[str(root), *NASTY, *env, *NASTY]}\n" * 2
    assert [*tmp_path.rglob("pwned"), *Path.cwd().glob("pwned")] == []
    assert calls.exists() == (cluster.type == "bcp")


def test_a_missing_value_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "TEMPLATES", tmp_path)
    (tmp_path / "x.j2").write_text("{{ absent }}")
    with pytest.raises(jinja2.UndefinedError):
        render("x.j2")


def test_html_escapes_every_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "TEMPLATES", tmp_path)
    for name in ("page.html.j2", "text.j2"):
        (tmp_path / name).write_text("{{ value }}")
    assert render("page.html.j2", value="<a b='c'> &") == "&lt;a b=&#39;c&#39;&gt; &amp;"
    assert render("text.j2", value="<a b='c'> &") == "<a b='c'> &"


@given(st.text())
def test_pbtxt_is_read_back(value: str) -> None:
    text_format = pytest.importorskip("google.protobuf.text_format")
    wrappers = pytest.importorskip("google.protobuf.wrappers_pb2")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return
    assert text_format.Parse(f"value: {pbtxt(value)}", wrappers.StringValue()).value == value


def test_pbtxt_literally() -> None:
    assert pbtxt('a "b" \\ ü\n') == '"a \\"b\\" \\\\ \\303\\274\\n"'
