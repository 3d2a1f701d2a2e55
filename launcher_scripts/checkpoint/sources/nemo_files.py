"""What lies where in an archive of NeMo's: its settings, and the weights of its ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from launcher_scripts.checkpoint.formats import distributed
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.source_tensor import SourceTensor
from launcher_scripts.checkpoint.sources.nemo_config import CONFIG_NAME, is_config, parse_config
from launcher_scripts.checkpoint.sources.shards import rank_files
from launcher_scripts.common.errors import CheckpointError, problem

WEIGHTS_NAME = "model_weights.ckpt"
DISTRIBUTED_FOLDER = "model_weights/"

_RANK_FOLDERS = (
    re.compile(r"tp_rank_(?P<tp>\d+)_pp_rank_(?P<pp>\d+)/" + re.escape(WEIGHTS_NAME)),
    re.compile(r"mp_rank_(?P<tp>\d+)/" + re.escape(WEIGHTS_NAME)),
    re.compile(re.escape(WEIGHTS_NAME)),
)
_CHOICES = (
    WEIGHTS_NAME,
    f"mp_rank_00/{WEIGHTS_NAME}",
    f"tp_rank_00_pp_rank_000/{WEIGHTS_NAME}",
    DISTRIBUTED_FOLDER + distributed.METADATA,
)


def config_files(archive: Archive) -> list[str]:
    """Every model_config.yaml of the archive."""
    return [name for name in archive.names() if is_config(name)]


def read_config(archive: Archive) -> tuple[str, Mapping[str, Any]]:
    """The folder of the only model_config.yaml ("" or ending in `/`), and what that says.

    Raises CheckpointError where there is none, more than one, or a damaged one.
    """
    found = config_files(archive)
    if len(found) != 1:
        raise CheckpointError(
            problem(f"{archive.path} must hold one {CONFIG_NAME}", got=found or "none")
        )
    name = found[0]
    raw = parse_config(archive.read(name), f"{name} of {archive.path}")
    return name.removesuffix(CONFIG_NAME), raw


def distributed_tensors(archive: Archive, root: str) -> dict[str, SourceTensor] | None:
    """The tensors of a distributed checkpoint below `root`; None where there is none."""
    folder = root + DISTRIBUTED_FOLDER
    if folder + distributed.METADATA not in archive.names():
        return None
    return distributed.read_tensors(archive, folder)


def weight_files(archive: Archive, root: str) -> list[list[str]]:
    """The files of the ranks below `root`, [pipeline stage][tensor-parallel rank]."""
    return rank_files(archive, root, _RANK_FOLDERS, _CHOICES)
