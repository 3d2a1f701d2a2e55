"""Images and mounts of a container, as pyxis and enroot take them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from launcher_scripts.cluster.job import Job
from launcher_scripts.common.errors import ConfigError, Problems, problem

# Characters that a mount cannot have, and why.
_REFUSED = {
    # Mounts stand between double quotes in a script that a shell on the node runs.
    "pyxis": (re.compile(r"[\"$`\\]"), 'pyxis has a shell read mounts: no ", $, ` or \\ in them'),
    # Mounts are fields of a line with escapes.
    "enroot": (re.compile(r"[\s\\]"), "enroot takes no mount with a space or a backslash"),
}
# enroot's notation of an image: [USER@][REGISTRY#]IMAGE[:TAG][@DIGEST].
_NAME = re.compile(
    r"([\w.!~*'()%;:&=+$,-]+@)?([^#/@\s]+#)?[a-z0-9/._-]+(:[\w.:-]+)?(@sha256:[0-9a-fA-F]+)?",
    re.ASCII,
)
_LOCAL_NAME = re.compile(r"(dockerd|podman)://[\w/.:-]+", re.ASCII)
_SQUASHFS = b"hsqs"
_DOCKER_HUB = ("docker.io", "index.docker.io", "registry-1.docker.io")
_ENROOT_MOUNT_FLAGS = "none:x-create=auto,rbind"


def is_file(image: str) -> bool:
    """Whether an image is given as a path; anything else is a name in a registry."""
    named = image.endswith((".sqsh", ".squashfs")) and "://" not in image
    return named or image.startswith(("/", ".", "~"))


def registry_name(image: str) -> str:
    """[USER@][REGISTRY#]IMAGE[:TAG], which every version of pyxis takes, from docker's spelling.

    A registry that is joined to the image with a slash would be looked up in Docker Hub, and not
    every pyxis knows the prefix docker://.
    """
    name = image.removeprefix("docker://")
    host, slash, rest = name.partition("/")
    user, at, registry = host.rpartition("@")
    if "://" in name or "#" in name or not slash:
        return name
    if registry in _DOCKER_HUB:
        return user + at + rest
    if "." in registry or ":" in registry or registry == "localhost":
        return f"{user}{at}{registry}#{rest}"
    return name


def image_problem(image: str) -> str | None:
    """Why no container can come of an image that is there, or of one with such a name."""
    if not is_file(image):
        name = registry_name(image)
        if _NAME.fullmatch(name) or _LOCAL_NAME.fullmatch(name):
            return None
        return "not a name of an image: [USER@][REGISTRY/]IMAGE[:TAG], with IMAGE in lower case"
    try:
        with Path(image).open("rb") as file:
            magic = file.read(len(_SQUASHFS))
    except IsADirectoryError:
        magic = b""
    except OSError:  # not for this user, or not on this machine
        return None
    return None if magic == _SQUASHFS else "the container image is not a squashfs file (.sqsh)"


def check_mounts(job: Job, runtime: str) -> None:
    """Refuse the mounts, of a job or its client, that `runtime` would take for something else."""
    if runtime not in _REFUSED:
        return
    pattern, reason = _REFUSED[runtime]
    problems = Problems(f"the {job.stage} job's container")
    containers = (owner.container for owner in (job, job.client) if owner is not None)
    mounts = (mount for container in containers if container for mount in container.mounts)
    for mount in dict.fromkeys(mounts):
        if pattern.search(mount):
            change = "container_mounts, or the key that holds the path"
            problems.add(reason, got=mount, change=change)
    problems.raise_if_any(ConfigError)


@dataclass(frozen=True)
class EnrootImage:
    """The image's file; one from a registry (`uri`) is fetched into it, through `partial`."""

    file: Path
    uri: str | None = None

    @property
    def partial(self) -> Path:
        return self.file.with_name(self.file.name + ".partial")

    @property
    def lock(self) -> Path:
        return self.file.with_name(self.file.name + ".lock")

    @classmethod
    def find(cls, image: str, cache: str | None) -> EnrootImage:
        """An absolute path is a file, anything else pyxis' name of an image in a registry."""
        if is_file(image):
            return cls(Path(image))
        if cache is None or not Path(cache).is_absolute():
            raise ConfigError(
                problem(
                    "an image of a registry needs an absolute folder to be kept in",
                    got=cache,
                    change="cluster.image_cache, or container (the path of a .sqsh file)",
                )
            )
        name = registry_name(image)
        uri = name if "://" in name else f"docker://{name}"
        stem = re.sub(r"[^A-Za-z0-9._-]", "+", uri.removeprefix("docker://"))
        return cls(Path(cache) / f"{stem}.sqsh", uri)


def enroot_mount(mount: str) -> str:
    """`source:target[:flag+flag]` as enroot's fields of an fstab."""
    source, target, *flags = mount.split(":")
    return ":".join(
        [source, target, ",".join([_ENROOT_MOUNT_FLAGS, *"+".join(flags).split("+")]).rstrip(",")]
    )
