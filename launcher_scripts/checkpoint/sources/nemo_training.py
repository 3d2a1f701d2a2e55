"""The folder of a NeMo training: which of its checkpoints to take, and where that one lies.

PyTorch Lightning writes `NAME.ckpt`, below a folder per rank where there are several, or one folder
NAME as a distributed checkpoint. The hyperparameters stand in hparams.yaml, beside or above.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.distributed import METADATA
from launcher_scripts.checkpoint.layout.shards import RANK_FOLDER
from launcher_scripts.common.errors import CheckpointError, problem
from launcher_scripts.common.untrusted import mapping, parse_yaml, read_plain

HPARAMS = "hparams.yaml"
CHECKPOINTS = "checkpoints"
KEY = "export.model.training_checkpoint"

_PER_RANK = re.compile(rf"(?:{RANK_FOLDER})?(?P<name>[^/]+)\.ckpt")
_DISTRIBUTED = re.compile(rf"(?P<name>[^/]+)/{re.escape(METADATA)}")
_UNFINISHED = "-unfinished"
_LAST = "-last"
_STEP = re.compile(r"step=(\d+)")
_METRIC = re.compile(r"--(?P<metric>[\w/]+)=(?P<value>-?\d+(?:\.\d+)?)")
# How far above the checkpoints their hyperparameters may lie.
_LEVELS = 3
_SHOWN = 3


@dataclass(frozen=True)
class TrainingCheckpoint:
    """One checkpoint of a training.

    raw:         `cfg` of hparams.yaml: what model_config.yaml holds in a .nemo file
    folder:      where hparams.yaml lies
    name:        of the checkpoint, without `.ckpt` and folder
    distributed: whether it is a folder of its own
    """

    raw: Mapping[str, Any]
    folder: Path
    name: str
    distributed: bool


def locate(path: Path, wanted: str) -> tuple[Path, str]:
    """The folder that holds the checkpoints, and which one is meant.

    path may be a training's folder, its `checkpoints`, or one of the checkpoints in there.
    """
    if path.is_file() and path.suffix == ".ckpt":
        below = re.fullmatch(RANK_FOLDER, f"{path.parent.name}/")
        return (path.parent.parent if below else path.parent), path.stem
    if (path / METADATA).is_file() and _hparams(path.parent) is not None:
        return path.parent, path.name
    if (path / HPARAMS).is_file() and (path / CHECKPOINTS).is_dir():
        return path / CHECKPOINTS, wanted
    return path, wanted


def is_training(archive: Archive) -> bool:
    """Whether the archive is a folder of checkpoints with their hyperparameters near."""
    if archive.container != "folder" or not _candidates(archive):
        return False
    return _hparams(archive.path) is not None


def without_sizes(archive: Archive) -> str:
    """What a folder of checkpoints that is not a source of its own lacks; "" for any other."""
    names = sorted(_candidates(archive)) if archive.container == "folder" else []
    if not names:
        return ""
    return (
        f"the checkpoints of a training ({', '.join(names[:_SHOWN])}) need its {HPARAMS}, which "
        f"holds the model's sizes, in this folder or up to {_LEVELS - 1} above; or name "
        "the .nemo file that the training wrote"
    )


def find_checkpoint(archive: Archive, wanted: str) -> TrainingCheckpoint:
    """The checkpoint called `wanted`, or the `last` or `best` one.

    Raises CheckpointError when it is not there or cannot be told.
    """
    found = _candidates(archive)
    name = _PICKS[wanted](sorted(found)) if wanted in _PICKS else wanted.removesuffix(".ckpt")
    if name not in found:
        raise CheckpointError(
            problem(
                f"{archive.path} has no such checkpoint",
                got=wanted,
                choices=[*_PICKS, *sorted(found)],
                change=KEY,
            )
        )
    file = _hparams(archive.path)
    if file is None:
        raise CheckpointError(
            problem(f"there is no {HPARAMS} in {archive.path} or above: it holds the sizes")
        )
    try:
        raw = mapping(mapping(parse_yaml(read_plain(file)))["cfg"])
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{file} is damaged or holds no section cfg: {error}") from error
    return TrainingCheckpoint(raw, file.parent, name, found[name])


def _hparams(folder: Path) -> Path | None:
    folders = (folder, *folder.absolute().parents)[:_LEVELS]
    return next((path / HPARAMS for path in folders if (path / HPARAMS).is_file()), None)


def _candidates(archive: Archive) -> dict[str, bool]:
    """Name -> whether it is a distributed one, of every checkpoint that was saved completely."""
    names = archive.names()
    marked = {name.removesuffix(_UNFINISHED) for name in names if name.endswith(_UNFINISHED)}
    found: dict[str, bool] = {}
    for pattern, distributed in ((_PER_RANK, False), (_DISTRIBUTED, True)):
        for match in filter(None, map(pattern.fullmatch, names)):
            found.setdefault(match["name"], distributed)
    return {name: kind for name, kind in found.items() if name not in marked}


def _step(name: str) -> int:
    match = _STEP.search(name)
    return int(match[1]) if match else -1


def _last(names: Sequence[str]) -> str:
    """The one NeMo calls so, else the one of the most steps."""
    marked = [name for name in names if name.endswith(_LAST)]
    return max(marked or names, key=_step)


def _best(names: Sequence[str]) -> str:
    """The one with the lowest loss in its name; of equal ones that of the most steps."""
    scores: dict[str, float] = {}
    for name in names:
        match = _METRIC.search(name)
        if match and "loss" in match["metric"]:
            scores[name] = float(match["value"])
    if not scores:
        raise CheckpointError(
            problem(
                "no checkpoint has a loss in its name, so the best one cannot be told",
                got="best",
                choices=["last", *names],
                change=KEY,
            )
        )
    return min(scores, key=lambda name: (scores[name], -_step(name), name.endswith(_LAST)))


_PICKS = {"last": _last, "best": _best}
