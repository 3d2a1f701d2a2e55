"""Mounts: their notation, and what a job sees of the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher_scripts.common.errors import ConfigError
from stages.checks import Mount, host_path, mounts_for


@pytest.mark.parametrize(
    ("text", "shown"),
    [("/a", "/a:/a"), ("/a:/b", "/a:/b"), ("/a b:/c:ro+rbind", "/a b:/c:ro+rbind")],
)
def test_notations(text: str, shown: str) -> None:
    assert str(Mount.parse(text)) == shown


@pytest.mark.parametrize(
    "text", ["", "a", "/a:b", "/a::ro", "/a:/b:ro:x", "/a,b", "/a\nb", "/a:/b:z"]
)
def test_what_pyxis_cannot_take(text: str) -> None:
    with pytest.raises(ConfigError, match="container_mounts"):
        Mount.parse(text)


def test_the_innermost_mount_decides_where_a_path_lies() -> None:
    mounts = [Mount.parse("/host/models:/models"), Mount.parse("/fast:/models/big")]
    assert host_path(Path("/models/a.nemo"), mounts) == Path("/host/models/a.nemo")
    assert host_path(Path("/models/big/b.nemo"), mounts) == Path("/fast/b.nemo")
    assert host_path(Path("/modelsx/a.nemo"), mounts) == Path("/modelsx/a.nemo")


def test_a_job_sees_all_of_its_paths_and_no_more() -> None:
    given = [Mount.parse("/host/models:/models:ro")]
    paths = ["/models/a.nemo", "/results/x/jobs/001", "/elsewhere/b/c.json", "/elsewhere/b/d"]
    mounts = mounts_for(map(Path, paths), [Path("/results"), Path("/data")], given)
    assert [str(mount) for mount in mounts] == [
        "/host/models:/models:ro",
        "/results:/results",
        "/elsewhere/b:/elsewhere/b",
    ]


def test_a_mount_inside_of_another_is_not_hidden_by_it() -> None:
    given = [Mount.parse("/fast/c:/results/c:ro"), Mount.parse("/models:/models")]
    mounts = mounts_for([Path("/results/jobs/001")], [Path("/results")], given)
    assert [str(mount) for mount in mounts] == [
        "/models:/models",
        "/results:/results",
        "/fast/c:/results/c:ro",
    ]


def test_no_mount_hides_the_image() -> None:
    paths = [Path("/models"), Path("/opt/b.nemo"), Path("/data/c.json")]
    mounts = mounts_for(paths, [Path("/results")], [Mount.parse("/:/host")])
    assert [str(mount) for mount in mounts] == [
        "/:/host",
        "/models:/models",
        "/data:/data",
        "/opt/b.nemo:/opt/b.nemo",
    ]
    with pytest.raises(ConfigError, match="would hide the image; got '/data:/'"):
        Mount.parse("/data:/")


def test_flags_are_told_apart_with_a_plus() -> None:
    with pytest.raises(ConfigError, match=r"joined with \+; got 'ro,noexec'"):
        Mount.parse("/a:/b:ro,noexec")
