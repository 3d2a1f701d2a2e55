"""Files in an archive of NeMo's: its settings, and the state dicts of its ranks.

A run with virtual pipeline stages keeps several chunks of layers on one rank, each a nested state
dict of its own (`model0`, `model1`, ...).

The folder of a NeMo training: which of its checkpoints to take, and where that one lies.

PyTorch Lightning writes `NAME.ckpt`, below a folder per rank where there are several, or one folder
NAME as a distributed checkpoint. The hyperparameters stand in hparams.yaml, beside or above.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher_scripts.checkpoint.formats import distributed, pickles, torch_file
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.distributed import METADATA
from launcher_scripts.checkpoint.formats.nemo_config import CONFIG_NAME, is_config, parse_config
from launcher_scripts.checkpoint.formats.source_tensor import SourceTensor
from launcher_scripts.checkpoint.layout.source_checkpoint import (
    RANK_FOLDER,
    StateDict,
    flat_values,
    in_layer_order,
    rank_files,
    renamed,
)
from launcher_scripts.common.errors import CheckpointError, problem
from launcher_scripts.common.files import mapping, parse_yaml, read_plain

WEIGHTS_NAME = "model_weights.ckpt"
DISTRIBUTED_FOLDER = "model_weights/"

_PREFIX = re.compile(
    r"^(?:model\.(?:module\.)?(?:language_model\.)?)?(?:enc_dec_model\.(?:module\.)?)*"
)
# Buffers and states no inference needs, and the last stage's copy of a tied table.
_IGNORED = re.compile(
    r"(.+[./])?_extra_state(/.*)?|(.+\.)?inv_freq|word_embeddings(_for_head)?\.weight"
)
_CHUNK = re.compile(r"model(\d+)")


def config_files(archive: Archive) -> list[str]:
    """Every model_config.yaml of the archive."""
    return [name for name in archive.names() if is_config(name)]


def read_nemo_config(archive: Archive) -> tuple[str, Mapping[str, Any]]:
    """The folder of the only model_config.yaml ("" or ending in `/`), and what that says.

    Raises CheckpointError where there is none, more than one, or a damaged one.
    """
    configs = config_files(archive)
    if len(configs) != 1:
        raise CheckpointError(
            problem(f"{archive.path} must hold one {CONFIG_NAME}", got=configs or "none")
        )
    name = configs[0]
    raw = parse_config(archive.read(name), f"{name} of {archive.path}")
    return name.removesuffix(CONFIG_NAME), raw


def distributed_tensors(archive: Archive, root: str) -> dict[str, SourceTensor] | None:
    """The tensors of a distributed checkpoint below `root`; None if there is none.

    Raises CheckpointError where the files of ranks are there too.
    """
    folder = root + DISTRIBUTED_FOLDER
    if folder + distributed.METADATA not in archive.names():
        return None
    ranks = re.compile(f"{re.escape(root)}(?:{RANK_FOLDER})?{re.escape(WEIGHTS_NAME)}")
    others = list(filter(ranks.fullmatch, archive.names()))
    if others:
        raise CheckpointError(
            problem(
                f"{archive.path} holds two sets of weights: {others[0]}, and {folder}",
                choices=["one of them: remove the leftover of another save"],
            )
        )
    return distributed.read_saved_tensors(archive, folder)


def rank_weight_files(archive: Archive, root: str) -> list[list[str]]:
    """The files of the ranks below `root`, [pipeline stage][tensor-parallel rank]."""
    return rank_files(archive, root, WEIGHTS_NAME, [DISTRIBUTED_FOLDER + distributed.METADATA])


def stripped(tensors: StateDict, origin: str) -> dict[str, SourceTensor]:
    """Names without their common prefix, without what inference does not need.

    origin: where they are from, for errors
    Raises CheckpointError for two tensors of one name.
    """
    named = ((name, _PREFIX.sub("", name), tensor) for name, tensor in tensors.items())
    return renamed((item for item in named if not _IGNORED.fullmatch(item[1])), origin)


def chunked_stages(
    archive: Archive,
    files: Sequence[Sequence[str]],
    raw: Mapping[str, Any],
) -> list[list[StateDict]]:
    """The state dicts in the order of the layers they hold, [stage of a chunk][rank].

    files: names, [pipeline stage][tensor-parallel rank]
    raw:   the hyperparameters
    """
    ranks = [[_chunks(archive, name) for name in stage] for stage in files]
    virtual = raw.get("virtual_pipeline_model_parallel_size") or 1
    return in_layer_order(archive, ranks, virtual if len(files) > 1 else None)


def _chunks(archive: Archive, name: str) -> list[StateDict]:
    """Return the contents of one file: one state dict, or one for every virtual stage."""
    origin = f"{name} of {archive.path}"
    loaded = torch_file.load_state(archive.region(name), origin)
    numbers = {
        int(match[1]): key for key in loaded if (match := _CHUNK.fullmatch(str(key))) is not None
    }
    if numbers:
        # Nested dicts lack the name of the module that holds them.
        chunks = [dict(flat_values({"model": loaded[numbers[n]]})) for n in sorted(numbers)]
        return [_state_dict(chunk, origin) for chunk in chunks]
    state = loaded.get("state_dict", loaded)
    pickles.check_readable(state, f"state_dict of {origin}")
    if not isinstance(state, dict):
        raise CheckpointError(f"{origin} holds no state dict")
    return [_state_dict(state, origin)]


def _state_dict(state: Mapping[Any, Any], origin: str) -> StateDict:
    tensors = dict(torch_file.tensors_of(state.items(), origin))
    others = [
        str(key)
        for key, value in state.items()
        if str(key) not in tensors
        and not _IGNORED.fullmatch(str(key))
        and not isinstance(value, pickles.Opaque)
    ]
    if others:
        raise CheckpointError(
            problem(
                f"{origin} holds something other than a model's weights; prompts and adapters are "
                "no models of their own",
                got=others[:3],
            )
        )
    converted = {name: SourceTensor.full(values) for name, values in tensors.items()}
    return stripped(converted, origin)


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
_MAX_LISTED = 3


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


def locate(path: Path, requested: str) -> tuple[Path, str]:
    """The folder that holds the checkpoints, and which one is meant.

    path may be a training's folder, its `checkpoints`, or one of the checkpoints in there.
    """
    if path.is_file() and path.suffix == ".ckpt":
        below = re.fullmatch(RANK_FOLDER, f"{path.parent.name}/")
        return (path.parent.parent if below else path.parent), path.stem
    if (path / METADATA).is_file() and _hparams(path.parent) is not None:
        return path.parent, path.name
    if (path / HPARAMS).is_file() and (path / CHECKPOINTS).is_dir():
        return path / CHECKPOINTS, requested
    return path, requested


def is_training(archive: Archive) -> bool:
    """Return whether the archive is a folder of checkpoints with their hyperparameters near."""
    if archive.container != "folder" or not _candidates(archive):
        return False
    return _hparams(archive.path) is not None


def without_sizes(archive: Archive) -> str:
    """Describe what a folder of checkpoints lacks to be a source; "" for any other folder."""
    names = sorted(_candidates(archive)) if archive.container == "folder" else []
    if not names:
        return ""
    return (
        f"the checkpoints of a training ({', '.join(names[:_MAX_LISTED])}) need its {HPARAMS}, "
        f"which holds the model's sizes, in this folder or up to {_LEVELS - 1} above; or name "
        "the .nemo file that the training wrote"
    )


def find_checkpoint(archive: Archive, requested: str) -> TrainingCheckpoint:
    """The checkpoint called `requested`, or the `last` or `best` one.

    Raises CheckpointError when it is not there or cannot be told.
    """
    candidates = _candidates(archive)
    name = (
        _PICKS[requested](sorted(candidates))
        if requested in _PICKS
        else requested.removesuffix(".ckpt")
    )
    if name not in candidates:
        raise CheckpointError(
            problem(
                f"{archive.path} has no such checkpoint",
                got=requested,
                choices=[*_PICKS, *sorted(candidates)],
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
    return TrainingCheckpoint(raw, file.parent, name, candidates[name])


def _hparams(folder: Path) -> Path | None:
    folders = (folder, *folder.absolute().parents)[:_LEVELS]
    return next((path / HPARAMS for path in folders if (path / HPARAMS).is_file()), None)


def _candidates(archive: Archive) -> dict[str, bool]:
    """Name -> whether it is a distributed one, of every checkpoint that was saved completely."""
    names = archive.names()
    marked = {name.removesuffix(_UNFINISHED) for name in names if name.endswith(_UNFINISHED)}
    candidates: dict[str, bool] = {}
    for pattern, is_folder in ((_PER_RANK, False), (_DISTRIBUTED, True)):
        for match in filter(None, map(pattern.fullmatch, names)):
            candidates.setdefault(match["name"], is_folder)
    return {name: kind for name, kind in candidates.items() if name not in marked}


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
