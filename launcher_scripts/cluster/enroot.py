"""Images and mounts as enroot takes them, for clusters without pyxis."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from launcher_scripts.cluster.containers import is_file, registry_name
from launcher_scripts.common.errors import ConfigError, problem

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
        [source, target, ",".join([_MOUNT_FLAGS, *"+".join(flags).split("+")]).rstrip(",")]
    )
