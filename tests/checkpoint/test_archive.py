"""Archives: read in place, and refused where they could do harm or are incomplete."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.common.errors import CheckpointError

CONTENT = bytes(range(256)) * 100


def write_tar(path: Path, *members: tuple[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def write_link(path: Path, name: str, kind: bytes, target: str) -> Path:
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, target
        archive.addfile(info)
    return path


@pytest.mark.parametrize(
    ("mode", "container"), [("w", "tar"), ("w:gz", "tar.gz"), (None, "folder")]
)
def test_reads_every_container(mode: str | None, container: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    if mode is None:
        (path / "sub").mkdir(parents=True)
        (path / "top").write_bytes(b"x")
        (path / "sub" / "data").write_bytes(CONTENT)
    else:
        write_tar(path, ("./top", b"x"), ("./sub/data", CONTENT), mode=mode)
    archive = Archive(path)
    assert archive.container == container
    assert archive.names() == ["sub/data", "top"]
    assert archive.read("top") == b"x"
    view = archive.region("sub/data").array(np.dtype("u1"), len(CONTENT))
    assert view.tobytes() == CONTENT
    assert not view.flags.writeable
    archive.forget(view)
    assert view.tobytes() == CONTENT


def test_gzip_leaves_no_file(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.nemo", ("data", CONTENT), mode="w:gz")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    archive = Archive(path, scratch)
    assert list(scratch.iterdir()) == []
    assert archive.read("data") == CONTENT


def test_a_region_keeps_its_bounds(tmp_path: Path) -> None:
    region = Archive(write_tar(tmp_path / "a", ("data", CONTENT))).region("data")
    for offset, size in ((-1, 2), (0, len(CONTENT) + 1), (len(CONTENT), 1), (0, -1)):
        with pytest.raises(CheckpointError, match="outside of its file"):
            region.part(offset, size)
    with pytest.raises(CheckpointError, match="outside of its file"):
        region.array(np.dtype("<f4"), len(CONTENT))


HARMFUL: dict[str, tuple[Callable[[Path], Path], str]] = {
    "parent": (lambda p: write_tar(p, ("../evil", b"x")), r"leads out.*\.\./evil"),
    "hidden parent": (lambda p: write_tar(p, ("a/../../evil", b"x")), "leads out"),
    "absolute": (lambda p: write_tar(p, ("/etc/evil", b"x")), "leads out.*/etc/evil"),
    "duplicate": (lambda p: write_tar(p, ("a", b"x"), ("./a", b"y")), "two members have one name"),
    "symlink": (lambda p: write_link(p, "a", tarfile.SYMTYPE, "/etc/passwd"), "is a link"),
    "hard link": (lambda p: write_link(p, "a", tarfile.LNKTYPE, "b"), "is a link"),
    "device": (lambda p: write_link(p, "a", tarfile.CHRTYPE, ""), "no plain file"),
    "fifo": (lambda p: write_link(p, "a", tarfile.FIFOTYPE, ""), "no plain file"),
}


@pytest.mark.parametrize("case", HARMFUL)
def test_refuses_what_could_do_harm(case: str, tmp_path: Path) -> None:
    make, message = HARMFUL[case]
    with pytest.raises(CheckpointError, match=message):
        Archive(make(tmp_path / "a.nemo"))


def test_all_refused_members_are_named_at_once(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a", ("../one", b""), ("/two", b""), ("ok", b""))
    with pytest.raises(CheckpointError, match="2 problems") as caught:
        Archive(path)
    assert "../one" in str(caught.value)
    assert "/two" in str(caught.value)


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_every_truncation_is_found(mode: str, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a", ("one", CONTENT), ("two", CONTENT), mode=mode)
    whole = path.read_bytes()
    # A tar is padded with zeros to 10 KiB: cutting within them loses nothing but the end mark.
    used = len(whole) if mode == "w:gz" else 2 * (512 + -(-len(CONTENT) // 512) * 512)
    for size in {*range(1, used, max(used // 37, 1)), 511, 512, 513, used - 1}:
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            Archive(path)
    if mode == "w":
        path.write_bytes(whole[:used])
        with pytest.raises(CheckpointError, match="no end mark"):
            Archive(path)


def test_what_is_no_archive(tmp_path: Path) -> None:
    text = tmp_path / "text"
    for content in (b"", b"hello" * 1000, gzip.compress(b"hello" * 1000)):
        text.write_bytes(content)
        with pytest.raises(CheckpointError, match="text"):
            Archive(text)
    with pytest.raises(CheckpointError, match="No such file"):
        Archive(tmp_path / "missing")


def test_a_folders_links_must_stay_inside(tmp_path: Path) -> None:
    outside = tmp_path / "secret"
    outside.write_bytes(b"secret")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "real").write_bytes(b"x")
    (folder / "inside").symlink_to("real")
    assert Archive(folder).read("inside") == b"x"
    (folder / "vocab.json").symlink_to(outside)
    with pytest.raises(CheckpointError, match=r"leads out.*vocab\.json"):
        Archive(folder)
