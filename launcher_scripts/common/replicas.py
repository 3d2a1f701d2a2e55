"""Several servers of the same run, told apart by their number: the names of their ready files."""

from __future__ import annotations

from pathlib import Path


def replica_file(path: Path, replica: int | None) -> Path:
    """The file of one of several servers of the same run: ready-0.json, ready-1.json, ..."""
    return path if replica is None else path.with_name(f"{path.stem}-{replica}{path.suffix}")


def replica_files(path: Path, replicas: int) -> tuple[Path, ...]:
    """The files of all `replicas` servers; 0: of the only one."""
    if not replicas:
        return (path,)
    return tuple(replica_file(path, number) for number in range(replicas))
