"""Images and mounts as enroot takes them, for clusters without pyxis."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from launcher_scripts.cluster.job import Job
from launcher_scripts.errors import ConfigError, Problems, problem

_MOUNT_FLAGS = "none:x-create=auto,rbind"


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
        if image.startswith("/"):
            return cls(Path(image))
        if cache is None or not Path(cache).is_absolute():
            raise ConfigError(
                problem(
                    "an image of a registry needs an absolute folder to be kept in",
                    got=cache,
                    change="cluster.image_cache, or container (the path of a .sqsh file)",
                )
            )
        uri = image if "://" in image else f"docker://{image}"
        name = re.sub(r"[^A-Za-z0-9._-]", "+", uri.removeprefix("docker://"))
        return cls(Path(cache) / f"{name}.sqsh", uri)


def enroot_mount(mount: str) -> str:
    """`source:target[:flag+flag]` as enroot's fields of an fstab."""
    source, target, *flags = mount.split(":")
    return ":".join(
        [source, target, ",".join([_MOUNT_FLAGS, *"+".join(flags).split("+")]).rstrip(",")]
    )


def check_enroot(job: Job) -> None:
    """Refuse what enroot cannot be told: its mounts and variables are fields of lines."""
    problems = Problems(f"the {job.stage} job's container")
    for mount in job.container.mounts if job.container else ():
        if re.search(r"\s", mount):
            problems.add("enroot takes no mount with a space", got=mount, change="container_mounts")
    for name, value in job.env.items():
        if "\n" in value:
            problems.add(f"enroot takes no line break in {name}", got=value, change="env_vars")
    problems.raise_if_any(ConfigError)
