"""Checks of the login side before any job starts, collected so that all are reported at once."""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from launcher_scripts.common.errors import ConfigError, Problems, problem
from launcher_scripts.config.gateway import DeployedGateway
from launcher_scripts.config.options import paths_in
from launcher_scripts.config.security import ServerSecurity, read_keys, too_open

# Those of fstab(5) and mount(8) that mean something for a folder of the host.
FLAGS = (
    *("ro", "rw", "exec", "noexec", "dev", "nodev", "suid", "nosuid", "nofail", "silent"),
    *("bind", "rbind", "atime", "noatime", "diratime", "nodiratime", "relatime", "norelatime"),
    *("sync", "async", "private", "rprivate", "shared", "rshared", "slave", "rslave"),
    *("unbindable", "runbindable", "x-create=auto", "x-create=dir", "x-create=file"),
)
# Folders where an image has programs and libraries, which a mount there would hide.
_OF_THE_IMAGE = frozenset(
    map(
        Path,
        (
            *("/", "/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/lib64", "/opt", "/proc"),
            *("/root", "/run", "/sbin", "/srv", "/sys", "/usr", "/usr/local", "/var", "/workspace"),
        ),
    )
)


@dataclass(frozen=True)
class Mount:
    """A folder of the host and its name in the container; pyxis joins flags with `+`."""

    source: Path
    target: Path
    flags: str = ""

    def __post_init__(self) -> None:
        for path in (self.source, self.target):
            if not path.is_absolute() or {",", ":"} & set(str(path)) or not str(path).isprintable():
                raise ConfigError(
                    problem(
                        "a mounted path must be absolute, on one line, and without comma and colon",
                        got=str(path),
                        change="container_mounts, or the key that holds the path",
                    )
                )
        if self.target == Path("/"):
            raise ConfigError(
                problem(
                    "a mount at / would hide the image",
                    got=str(self),
                    change="container_mounts, or the key that holds the path",
                )
            )
        unknown = [flag for flag in self.flags.split("+") if flag not in FLAGS]
        if self.flags and unknown:
            raise ConfigError(
                problem(
                    "flags of a mount are joined with +",
                    got=self.flags,
                    choices=FLAGS,
                    change="container_mounts",
                )
            )

    @classmethod
    def parse(cls, text: str) -> Mount:
        """`source`, `source:target` or `source:target:flags`."""
        parts = text.split(":")
        if len(parts) > 3 or not all(parts):
            raise ConfigError(
                problem(
                    "a mount is source, source:target or source:target:flags",
                    got=text,
                    change="container_mounts",
                )
            )
        source, target, flags = (*parts, *([parts[0], ""][len(parts) - 1 :]))
        return cls(Path(source), Path(target), flags)

    def __str__(self) -> str:
        return ":".join(filter(None, (str(self.source), str(self.target), self.flags)))


def host_path(path: Path, mounts: Iterable[Mount]) -> Path:
    """The path on this machine of a path in the container; the innermost mount decides."""
    holding = [mount for mount in mounts if path.is_relative_to(mount.target)]
    if not holding:
        return path
    mount = max(holding, key=lambda mount: len(mount.target.parts))
    return mount.source / path.relative_to(mount.target)


def mounts_for(
    paths: Iterable[Path], folders: Iterable[Path], values: Iterable[Mount]
) -> tuple[Mount, ...]:
    """The given mounts, and what is needed beside them to see every path under its own name.

    A path below one of `folders` is seen through that folder; for any other, its parent folder is
    mounted, unless that would hide what an image has there. A mount comes before those inside of
    it, which it would hide.
    """
    mounts = list(values)
    common = list(folders)
    for path in paths:
        if any(path.is_relative_to(mount.target) for mount in mounts):
            continue
        mounted = path if path.parent in _OF_THE_IMAGE else path.parent
        folder = next((folder for folder in common if path.is_relative_to(folder)), mounted)
        mounts.append(Mount(folder, folder))
    return tuple(sorted(mounts, key=lambda mount: len(mount.target.parts)))


_PROGRAM = """import sys
from importlib.machinery import PathFinder
print(*(name for name in sys.argv[1:] if PathFinder.find_spec(name) is None))"""
_PYTHON_SECONDS = 20.0


@cache
def missing_packages(python: str, path: str | None, names: tuple[str, ...]) -> tuple[str, ...]:
    """The modules that a Python of this machine does not find; () if it cannot be asked here.

    path: its PYTHONPATH; None: it is this Python as it is
    """
    if path is None:
        return tuple(name for name in names if PathFinder.find_spec(name) is None)
    env = {**os.environ, "PYTHONPATH": path}
    command = [python, "-c", _PROGRAM, *names]
    try:
        result = subprocess.run(
            command, env=env, capture_output=True, text=True, check=False, timeout=_PYTHON_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(result.stdout.split()) if result.returncode == 0 else ()


SECURITY_KEY = "deploy.server.security"
_SECRET_NAME = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY|ACCESS_KEY|ACCESS_KEY_ID|STORAGE_KEY)(_|$)",
    re.IGNORECASE,
)
_PATH_NAME = re.compile(r"_(FILE|PATH|DIR)$", re.IGNORECASE)
_TIME_LIMIT = re.compile(r"\d+(:\d+(:\d+)?)?|\d+-\d+(:\d+(:\d+)?)?")


class Checks:
    """Problems, and apart from them what is only absent here.

    A dry run may be made away from the cluster's file system, so there absent paths are notes;
    everywhere else they are problems too.
    """

    def __init__(self, mounts: Iterable[Mount] = ()) -> None:
        self.problems = Problems("the configuration")
        self.absent = Problems("this machine")
        self._mounts = tuple(mounts)

    def on_host(self, path: str | Path) -> Path:
        """Return the path on this machine of a path that the jobs see."""
        return host_path(Path(path), self._mounts)

    def exists(self, subject: str, path: str | Path, change: str, advice: str = "") -> bool:
        """Return whether `path` is there; its absence is noted, with advice."""
        try:
            if self.on_host(path).exists():
                return True
            self.absent.add(f"{subject} is not there{advice}", got=str(path), change=change)
        except OSError as error:
            self.problems.add(
                f"{subject} cannot be read: {error.strerror}", got=str(path), change=change
            )
        return False

    def private(self, subject: str, path: str | Path, change: str) -> None:
        """A file that is there, and that nobody but its owner may use."""
        if not self.exists(subject, path, change):
            return
        reason = too_open(self.on_host(path))
        if reason is not None:
            self.problems.add(reason, got=str(path), change=change)

    def paths(self, subject: str, settings: Any, key: str) -> None:
        """Every path that `settings` name is there, and nobody else may use those that are secret.

        subject: for errors, with {} for the path's name;  key: of the configuration, of `settings`
        """
        for named in paths_in(settings):
            check = self.private if named.private else self.exists
            check(subject.format(named.name), named.path, f"{key}.{named.name}")

    def port(self, host: str, port: int, change: str) -> None:
        """A port of this machine that a job is going to listen on; 0 is a free one."""
        if not port:
            return
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    text = "the port is in use by another program"
                    self.absent.add(text, got=port, change=f"{change} (0: a free one)")

    def space(self, folder: Path, size: int, change: str) -> None:
        """Room for `size` bytes of files in a folder that a job is going to make."""
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        if size > free:
            self.absent.add(
                f"{folder} needs about {size / 1e9:,.1f} GB of files",
                got=f"{free / 1e9:,.1f} GB free on that disk",
                change=change,
            )

    def time_limit(self, value: str, change: str) -> None:
        """Slurm's notations of a time."""
        if not _TIME_LIMIT.fullmatch(value):
            notations = ("minutes", "hours:minutes:seconds", "days-hours:minutes:seconds")
            self.problems.add("not a time limit", got=value, choices=notations, change=change)

    def ranks(
        self, ranks: int, nodes: int, gpus_per_node: int | None, max_nodes: int | None
    ) -> None:
        """Check that `ranks` tensor x pipeline parallel ranks fit on the nodes, one GPU each."""
        sizes = "export.model.tensor_model_parallel_size, "
        sizes += "export.triton_deployment.pipeline_model_parallel_size, deploy.run.nodes"
        if max_nodes is not None and nodes > max_nodes:
            self.problems.add(
                f"{ranks} ranks need {nodes} nodes, and this cluster type has {max_nodes}",
                change=f"cluster_type, {sizes}",
            )
        elif ranks % nodes:
            self.problems.add(
                f"{ranks} ranks cannot be divided evenly over {nodes} nodes",
                choices=[count for count in range(1, ranks + 1) if ranks % count == 0],
                change=sizes,
            )
        elif gpus_per_node is not None and ranks // nodes > gpus_per_node:
            self.problems.add(
                f"{ranks} ranks on {nodes} nodes need {ranks // nodes} GPUs on each",
                got=gpus_per_node,
                change=f"cluster.gpus_per_node, {sizes}",
            )


def check_gateway(
    checks: Checks, gateway: DeployedGateway, server: ServerSecurity, key: str
) -> None:
    """Its files are there, those that are secret are private, and it speaks as its server does.

    key: of the configuration, where the gateway is said
    """
    checks.paths("{} of the gateway", gateway, key)
    if gateway.api_keys is not None:
        keys = checks.on_host(gateway.api_keys)
        if keys.is_file() and too_open(keys) is None:  # else it is noted above
            with checks.problems.collecting():
                read_keys(keys, f"{key}.api_keys")
    if server.grpc_tls is not None and gateway.grpc_tls is None:
        checks.problems.add(
            "the server's gRPC speaks TLS",
            change=f"{key}.grpc_tls={{ca: FILE}}, whose certificates the gateway trusts",
        )


def check_variables(checks: Checks, names: Iterable[str]) -> None:
    """Variables become lines of a script, which is no place for a secret."""
    for name in names:
        if _SECRET_NAME.search(name) and not _PATH_NAME.search(name):
            checks.problems.add(
                f"the value of {name} would be written into scripts: put the line {name}=... into "
                f"a file of mode 600",
                choices=(
                    "the environment you submit from",
                    f"{SECURITY_KEY}.secrets_file (the file)",
                ),
                change=f"env_vars.{name}",
            )
