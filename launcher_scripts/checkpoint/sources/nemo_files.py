"""What lies where in an archive of NeMo's: its settings, and the state dicts of its ranks.

A run with virtual pipeline stages keeps several chunks of layers on one rank, each a nested state
dict of its own (`model0`, `model1`, ...).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from launcher_scripts.checkpoint.formats import distributed, pickles, torch_file
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.nemo_config import CONFIG_NAME, is_config, parse_config
from launcher_scripts.checkpoint.formats.source_tensor import SourceTensor
from launcher_scripts.checkpoint.layout.shards import (
    RANK_FOLDER,
    StateDict,
    flattened,
    in_layer_order,
    rank_files,
)
from launcher_scripts.checkpoint.sources.renaming import renamed
from launcher_scripts.common.errors import CheckpointError, problem

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
    return distributed.read_tensors(archive, folder)


def weight_files(archive: Archive, root: str) -> list[list[str]]:
    """The files of the ranks below `root`, [pipeline stage][tensor-parallel rank]."""
    return rank_files(archive, root, WEIGHTS_NAME, [DISTRIBUTED_FOLDER + distributed.METADATA])


def stripped(tensors: StateDict, origin: str) -> dict[str, SourceTensor]:
    """Names without their common prefix, without what inference does not need.

    origin: where they are from, for errors
    Raises CheckpointError for two tensors of one name.
    """
    named = ((name, _PREFIX.sub("", name), tensor) for name, tensor in tensors.items())
    return renamed((each for each in named if not _IGNORED.fullmatch(each[1])), origin)


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
    """What one file holds: one state dict, or one for every virtual stage."""
    origin = f"{name} of {archive.path}"
    loaded = torch_file.load_state(archive.region(name), origin)
    numbers = {
        int(match[1]): key for key in loaded if (match := _CHUNK.fullmatch(str(key))) is not None
    }
    if numbers:
        # Nested dicts lack the name of the module that holds them.
        chunks = [dict(flattened({"model": loaded[numbers[n]]})) for n in sorted(numbers)]
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
    whole = {name: SourceTensor.whole(values) for name, values in tensors.items()}
    return stripped(whole, origin)
