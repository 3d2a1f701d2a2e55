"""Checkpoints of adapters alone that NeMo 2 and Megatron Bridge wrote, in distributed form."""

from __future__ import annotations

from pathlib import Path

from launcher_scripts.checkpoint.convert.plan import SourceCheckpoint
from launcher_scripts.checkpoint.formats import distributed
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.sources import core_adapters
from launcher_scripts.checkpoint.sources.megatron import TABLE, the_latest
from launcher_scripts.checkpoint.sources.megatron_core import model_names, peft_settings, roots
from launcher_scripts.checkpoint.sources.merging import Adapter
from launcher_scripts.checkpoint.sources.nemo_files import config_files
from launcher_scripts.common.errors import CheckpointError
from launcher_scripts.config.settings import CHECKPOINT_KEY


def matches(path: Path) -> bool:
    """Whether a folder holds a distributed checkpoint that is none of NeMo 1."""
    if not path.is_dir():
        return False
    archive = Archive(path)
    return bool(roots(archive)) and not config_files(archive)


def read_adapter(path: Path, base: SourceCheckpoint) -> Adapter:
    """The adapter, for `base`.

    Raises CheckpointError for what is damaged, a whole model, or not supported.
    """
    archive = Archive(path)
    root = the_latest(archive, roots(archive))
    tensors = model_names(distributed.read_tensors(archive, root))
    if TABLE in tensors:
        raise CheckpointError(
            f"{path} holds a whole model with its adapters: name it in {CHECKPOINT_KEY}"
        )
    settings = peft_settings(archive, root)
    for name, tensor in tensors.items():
        for piece in tensor.pieces:
            archive.check(piece.values, name)
    return core_adapters.adapter_of(path, tensors, settings, base.config, tuple(base.dialects))
