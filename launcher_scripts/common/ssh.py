"""This launcher on a cluster's login node, over the system's ssh.

A copy of the code and of conf/ lies in ~/.cache/nemo-deployment-launcher/<digest> there: jobs that
run keep the copy that they were started with.
"""

from __future__ import annotations

import hashlib
import io
import re
import shlex
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launcher_scripts.common.errors import ClusterError, ConfigError, problem
from launcher_scripts.common.processes import CHECKOUT

_COPIED = ("main.py", "conf", "launcher_scripts", "requirements", "stages", "templates")
_IGNORED = ("__pycache__", "results")
_FOLDER = "$HOME/.cache/nemo-deployment-launcher"
_ABSENT = 97  # exit code where the copy is not there
_SSH_FAILED = 255
_HOST = re.compile(r"[\w@.:%\[\]+-]+", re.ASCII)


@dataclass(frozen=True)
class LoginNode:
    """A login node, as ssh names it: user@host, or a Host of ~/.ssh/config.

    python: the interpreter there, with the launcher's packages
    """

    host: str
    python: str = "python3"

    def __post_init__(self) -> None:
        if self.host.startswith("-") or not _HOST.fullmatch(self.host):
            text = problem("not a host of ssh", got=self.host, change="cluster.ssh=user@login")
            raise ConfigError(text)

    def run(self, arguments: Sequence[str], *, capture: bool = False) -> tuple[int, str]:
        """Run Python with these arguments in the copy; copies first where that is not there.

        Returns the exit code, and what it printed if `capture` is set. Raises ClusterError where
        ssh fails.
        """
        files = dict(_files())
        digest = hashlib.sha256()
        for name, content in files.items():
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        folder = f'"{_FOLDER}/{digest.hexdigest()[:16]}"'
        words = shlex.join([self.python, *arguments])
        script = f"cd {folder} 2>/dev/null || exit {_ABSENT}; exec {words}"
        result = self._ssh(script, capture=capture)
        if result.returncode == _ABSENT:
            copying = (
                f'set -e; d={folder}; mkdir -p "$d.$$"; tar -xf - -C "$d.$$"; '
                'mv -T "$d.$$" "$d" || { rm -rf "$d.$$"; [ -d "$d" ]; }'
            )
            if self._ssh(copying, content=_archive(files)).returncode:
                raise ClusterError(
                    problem("cannot copy the launcher", change=f"space on {self.host}")
                )
            result = self._ssh(script, capture=capture)
        return result.returncode, (result.stdout or b"").decode("utf-8", "replace")

    def _ssh(
        self, script: str, *, content: bytes = b"", capture: bool = False
    ) -> subprocess.CompletedProcess[bytes]:
        # The login shell there may be another one than sh.
        command = ["ssh", "--", self.host, shlex.join(["sh", "-c", script])]
        output = subprocess.PIPE if capture else None
        try:
            result = subprocess.run(command, check=False, stdout=output, input=content)
        except OSError as error:
            raise ClusterError(f"cannot run ssh: {error}") from error
        if result.returncode == _SSH_FAILED:
            text = f"ssh cannot reach {self.host}; try: ssh {self.host} true"
            raise ClusterError(problem(text, change="cluster.ssh"))
        return result


def _files() -> Iterator[tuple[str, bytes]]:
    """The files to copy, by their paths in the checkout."""
    for name in _COPIED:
        path = CHECKOUT / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            relative = file.relative_to(CHECKOUT)
            if file.is_file() and not set(relative.parts) & set(_IGNORED):
                yield str(relative), file.read_bytes()


def _archive(files: dict[str, bytes]) -> bytes:
    """The files as a tar archive."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), (CHECKOUT / name).stat().st_mode & 0o777
            archive.addfile(info, io.BytesIO(content))
    return data.getvalue()


def submit(host: str, python: str, arguments: Sequence[str]) -> int:
    """Run this command line of main.py on the login node; returns its exit code."""
    keys = {argument.partition("=")[0].lstrip("+") for argument in arguments}
    results = next((a for a in arguments if a.startswith("base_results_dir=")), "")
    if not results.partition("=")[2].strip("'\"").startswith("/"):
        raise ConfigError(
            problem(
                "results of a job that is submitted over ssh need a folder of the cluster",
                got=results or "no base_results_dir",
                change="base_results_dir=/absolute/path",
            )
        )
    local = {"cluster.ssh", "cluster.ssh_python"} & keys
    others = [a for a in arguments if a.partition("=")[0].lstrip("+") not in local]
    return LoginNode(host, python).run(["main.py", *others, "cluster.ssh=null"])[0]
