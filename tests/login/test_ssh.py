"""Submission over ssh: the login node is this machine, by a stand-in for ssh or a real sshd."""

from __future__ import annotations

import getpass
import json
import os
import pwd
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher_scripts.common import hosts
from launcher_scripts.common.errors import ClusterError, ConfigError
from launcher_scripts.common.hosts import LoginNode
from tests.login.conftest import Run
from tests.processes import wait_for

HOST = "me@login"
SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
# What ssh does: its last argument goes to the login shell, in the home directory.
STAND_IN = """#!/bin/sh
[ "$1 $2" = "-- {host}" ] || exit 255
cd {home} && echo call >> {calls} && HOME={home} exec sh -c "$3"
"""


def write_program(folder: Path, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "ssh").write_text(text)
    (folder / "ssh").chmod(0o755)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home directory of the login node, which a stand-in for ssh reaches."""
    home = tmp_path / "a 'home'"
    home.mkdir()
    quoted = {"home": shlex.quote(str(home)), "calls": shlex.quote(str(tmp_path / "ssh_calls"))}
    write_program(tmp_path / "bin", STAND_IN.format(host=HOST, **quoted))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return home


@pytest.fixture
def sshd_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The same by a real sshd, of this user and for this test."""
    if SSHD is None or shutil.which("ssh-keygen") is None:
        pytest.skip("openssh-server is not installed: no sshd")
    if os.geteuid() == 0 and "sshd" not in {user.pw_name for user in pwd.getpwall()}:
        pytest.skip("openssh-server is not installed: no user sshd")
    home, program = tmp_path / "home", shutil.which("ssh")
    home.mkdir()
    for name in ("host_key", "key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)]
        subprocess.run(command, check=True)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    (tmp_path / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {tmp_path}/host_key\nStrictModes no\n"
        f"AuthorizedKeysFile {tmp_path}/key.pub\nPidFile none\nUsePAM no\n"
        f"SetEnv HOME={home} PATH={os.environ['PATH']}\n"
    )
    (tmp_path / "config").write_text(
        f"Host login\nHostName 127.0.0.1\nPort {port}\nUser {getpass.getuser()}\n"
        f"IdentityFile {tmp_path}/key\nStrictHostKeyChecking no\n"
        f"UserKnownHostsFile {tmp_path}/known_hosts\nBatchMode yes\nLogLevel ERROR\n"
    )
    write_program(tmp_path / "bin", f'#!/bin/sh\nexec {program} -F {tmp_path}/config "$@"\n')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    command = [SSHD, "-D", "-e", "-f", str(tmp_path / "sshd_config")]
    with (tmp_path / "sshd.log").open("w") as log:
        process = subprocess.Popen(command, stderr=log)
    try:
        node = ["ssh", "login", "true"]
        wait_for(
            lambda: (
                process.poll() is not None
                or not subprocess.run(node, check=False, capture_output=True).returncode
            )
        )
        assert process.poll() is None, (tmp_path / "sshd.log").read_text()
        yield home
    finally:
        process.terminate()
        process.wait(30)


def check_copy(node: LoginNode, home: Path) -> None:
    words = ["a b", "it's", "$HOME `id`", "", "line\nline"]
    program = "import json, os, sys; print(json.dumps([os.getcwd(), os.listdir(), sys.argv[1:]]))"
    code, text = node.run(["-c", program, *words], capture=True)
    folder, names, arguments = json.loads(text)
    assert (code, arguments) == (0, words)
    assert sorted(names) == sorted(hosts._COPIED)
    assert Path(folder).parent == home / ".cache" / "nemo-deployment-launcher"
    assert node.run(["-c", "raise SystemExit(7)"])[0] == 7
    assert len(list(Path(folder).parent.iterdir())) == 1


def test_the_launcher_is_copied_once(home: Path, tmp_path: Path) -> None:
    node = LoginNode(HOST, sys.executable)
    check_copy(node, home)
    assert (tmp_path / "ssh_calls").read_text().split() == ["call"] * 4


def test_a_real_sshd(sshd_home: Path) -> None:
    check_copy(LoginNode("login", sys.executable), sshd_home)


@pytest.mark.usefixtures("home")
def test_what_ssh_cannot_do_is_named() -> None:
    with pytest.raises(ClusterError, match="ssh cannot reach you@login; try: ssh you@login true"):
        LoginNode("you@login").run(["-c", ""])
    for host in ("-oProxyCommand=id", "a b", ""):
        with pytest.raises(ConfigError, match=r"not a host of ssh; got .* change cluster.ssh"):
            LoginNode(host)


def test_jobs_are_submitted_from_the_login_node(
    run: Run, home: Path, calls: Path, arguments: list[str], tmp_path: Path
) -> None:
    over = ["cluster_type=bcm", f"cluster.ssh={HOST}", f"cluster.ssh_python={sys.executable}"]
    line = [*over, "stages=[export]", *arguments, "cluster.container_runtime=none"]
    line = [word for word in line if not word.startswith("base_results_dir")]
    refused = run(*line)
    assert refused.returncode == 3
    assert "need a folder of the cluster; got 'no base_results_dir'; change" in refused.stderr
    done = run(*line, f"base_results_dir='{tmp_path / 'the results'}'")
    assert done.returncode == 0, done.stderr
    assert "export: submitted export_tiny as Slurm job 101" in done.stdout
    (call,) = calls.read_text().splitlines()
    assert call.endswith("export_tiny_submission.sh")
    (copy,) = home.glob(".cache/nemo-deployment-launcher/*")
    record = json.loads(next(tmp_path.glob("the results/**/job.json")).read_text())
    assert record["directory"] == str(copy)
    over = ("--ssh", HOST, "--ssh-python", sys.executable)
    listed = run(*over, "info", "--json", "export_tiny", script=jobs())
    assert listed.returncode == 0, listed.stderr
    assert json.loads(listed.stdout)[0]["id"] == "101"


def jobs() -> Path:
    return hosts.CHECKOUT / "launcher_scripts" / "jobs" / "__main__.py"
