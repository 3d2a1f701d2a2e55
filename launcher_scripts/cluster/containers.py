"""Images and mounts of a container, as pyxis and enroot take them."""

from __future__ import annotations

import re
from pathlib import Path

from launcher_scripts.cluster.job import Job
from launcher_scripts.common.errors import ConfigError, Problems

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
