"""Which folders of the host the jobs see in their container, and under which names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from launcher_scripts.common.errors import ConfigError, problem

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
    paths: Iterable[Path], folders: Iterable[Path], given: Iterable[Mount]
) -> tuple[Mount, ...]:
    """The given mounts, and what is needed beside them to see every path under its own name.

    A path below one of `folders` is seen through that folder; for any other, its parent folder is
    mounted, unless that would hide what an image has there. A mount comes before those inside of
    it, which it would hide.
    """
    mounts = list(given)
    common = list(folders)
    for path in paths:
        if any(path.is_relative_to(mount.target) for mount in mounts):
            continue
        own = path if path.parent in _OF_THE_IMAGE else path.parent
        folder = next((folder for folder in common if path.is_relative_to(folder)), own)
        mounts.append(Mount(folder, folder))
    return tuple(sorted(mounts, key=lambda mount: len(mount.target.parts)))
