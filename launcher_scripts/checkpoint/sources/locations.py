"""Locations of checkpoints, and advice about a path without one.

Neither numpy nor torch is needed here: the login side asks, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath

from launcher_scripts.checkpoint.formats.nemo_config import CONFIG_NAME, MEGATRON_FILES, is_packed
from launcher_scripts.common.errors import CheckpointError, problem
from launcher_scripts.config.settings import CHECKPOINT_KEY

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SNAPSHOTS = "snapshots"
_ADAPTER = "adapter_config.json"
TRACKER_NAME = "latest_checkpointed_iteration.txt"
# Files that make a folder a checkpoint of one of the sources: in it, and in it or below.
_TOP = ("config.json", "config.ini")
_ANYWHERE = (CONFIG_NAME, "metadata.json", *MEGATRON_FILES)
_TRAINED = ".ckpt"
_ITERATION = re.compile(r"iter_\d+")
_WEIGHTS = (".safetensors", ".bin")
_PARTS = re.compile(r".+\.(safetensors|bin|pt|pth|index\.json)|config\.json|config\.ini")
_LATER_PART = re.compile(r".+-(?!00001)\d{5}-of-\d{5}\.gguf")
_TABLE = ".metadata"
_CROSS_ATTENTION = "decoder.layers.cross_attention."
_MAX_TABLE = 1 << 28
_MAX_FOLDERS = 200
_MAX_FILES = 20_000
_MAX_LISTED = 10
# Files of weights that are not in transformers' form -> what to do; the first that is there counts.
_FOREIGN = (
    (
        r"adapter_model\.(safetensors|bin)",
        "an adapter: name the folder in export.model.adapter_checkpoints, and its base here",
    ),
    (
        r"consolidated(\.|-).*(safetensors|pth|pt)|consolidated\.safetensors",
        "Mistral's and Meta's own form: export the model's Hugging Face form, or convert it with "
        "transformers' convert_mistral_weights_to_hf.py or convert_llama_weights_to_hf.py",
    ),
    (
        r".+-\d{5}-of-\d{5}\.(safetensors|bin)",
        "shards without their index: fetch {name}.index.json of the same model, which names them",
    ),
    (r".+\.gguf", f"GGUF: name the file itself in {CHECKPOINT_KEY}"),
    (
        r"(tf_model|flax_model|model)\.(h5|msgpack|ckpt.*)",
        "TensorFlow's or Flax's: save it from transformers with save_pretrained",
    ),
    (
        r"(.+/)?(zero_pp_rank_|mp_rank_).*model_states\.pt|(.+/)?.*optim_states\.pt",
        "DeepSpeed's shards: join them with its zero_to_fp32.py",
    ),
    (
        r"(.+/)?__\d+_\d+\.distcp",
        "FSDP's shards: join them with `accelerate merge-weights`",
    ),
    (
        r".+\.(incomplete|part|aria2|crdownload)",
        "a download that has not ended: run it again",
    ),
    (r"[^/]+\.(safetensors|bin)", "weights of another name: rename the file to {name}"),
)


def snapshot_of(path: Path) -> Path:
    """The one snapshot of a model's folder in the hub's cache (`models--x--y`); else `path`.

    Raises CheckpointError where there are several, or none.
    """
    folder = path if path.name == _SNAPSHOTS else path / _SNAPSHOTS
    if not folder.parent.name.startswith("models--") or not folder.is_dir():
        return path
    snapshots = sorted(snapshot for snapshot in folder.iterdir() if snapshot.is_dir())
    if len(snapshots) != 1:
        raise CheckpointError(
            problem(
                f"{path} is a model in the hub's cache with {len(snapshots)} snapshots; expected 1",
                choices=snapshots,
                change=CHECKPOINT_KEY,
            )
        )
    return snapshots[0]


def hub_advice(path: str) -> str:
    """Return advice about a path that looks like a model's name on the hub; "" for another."""
    if not _HUB_ID.fullmatch(path) or path.startswith("."):
        return ""
    return (
        f"; it looks like the name of a model on a hub, which is not downloaded here: run "
        f"`hf download {path} --local-dir FOLDER` first, and name the folder"
    )


def holds_core_t5(path: Path) -> bool:
    """Return whether a folder has a T5 that Megatron-LM core saved, or trainings of one: the names
    of its tensors are the folders' (zarr), or in the table of all tensors (torch_dist).
    """
    try:
        files = _files(path) if path.is_dir() else []
        return any(_CROSS_ATTENTION in str(file) for file in files) or any(
            _CROSS_ATTENTION.encode() in (path / file).read_bytes()[:_MAX_TABLE]
            for file in files
            if file.name == _TABLE
        )
    except OSError:
        return False


def not_a_checkpoint(path: Path) -> str:
    """Describe what is there in place of a checkpoint, and what to do.

    "" for what looks like a checkpoint, which the readers judge, and for what cannot be read.
    """
    try:
        if not path.is_dir():
            return _other_file(path) if path.is_file() else ""
        files = _files(path)
        if _is_source(files):
            return ""
        names = list(map(str, files))
        if _ADAPTER in names:
            return "it is an adapter: name it in export.model.adapter_checkpoints, its base here"
        below = _checkpoints_below(path)
    except OSError:
        return ""
    listed = ", ".join([*below[:_MAX_LISTED], *(["..."] if below[_MAX_LISTED:] else [])])
    if below:
        return f"it holds the checkpoints {listed}: name one of them"
    return foreign_weights(names) or "it holds no checkpoint of a known format"


def _other_file(path: Path) -> str:
    """Describe a file that is not a packed checkpoint, a GGUF file or a config.ini."""
    if is_packed(path):
        return ""
    if _PARTS.fullmatch(path.name):
        return f"it is one file of a checkpoint: name its folder, {path.parent}"
    return "it is a file of no known format (.nemo, .gguf)"


def _files(path: Path) -> list[PurePosixPath]:
    """The first files of a folder and below, relative to it."""
    files = (
        PurePosixPath(os.path.relpath(folder, path)) / name
        for folder, _, names in os.walk(path)
        for name in names
    )
    return list(islice(files, _MAX_FILES))


def _is_source(files: Sequence[PurePosixPath]) -> bool:
    """True if a folder with these files is one checkpoint, or those of one training. The readers
    judge one with more files than are looked at.
    """
    if len(files) == _MAX_FILES:
        return True
    top = {file.name for file in files if len(file.parts) == 1}
    if top & {*_TOP, TRACKER_NAME} or any(file.suffix == _TRAINED for file in files):
        return True
    configs = [file for file in files if file.name in _ANYWHERE]
    # A folder above checkpoints of transformers, or above several of NeMo.
    below = {str(file.parent) for file in files if file.suffix in _WEIGHTS}
    below &= {str(file.parent) for file in files if file.name == _TOP[0]}
    if not configs or below or sum(file.name == CONFIG_NAME for file in configs) > 1:
        return False
    # A folder above trainings, or above iterations of which no file tells the latest.
    tracked = {file.parent for file in files if file.name == TRACKER_NAME}
    roots = {
        folder
        for file in configs
        for folder in file.parents
        if _ITERATION.fullmatch(folder.name) or folder.parent in tracked
    }
    return len(roots) < 2


def _is_checkpoint(path: Path) -> bool:
    """True if a file or folder looks like a checkpoint; what is below is another question."""
    if path.is_dir():
        return not os.access(path, os.R_OK) or _is_source(_files(path))
    return path.is_file() and not _other_file(path)


def _checkpoints_below(path: Path) -> list[str]:
    """Names of the files and folders in a folder, or one below, that look like checkpoints."""
    names: list[str] = []
    for candidate in _below(path):
        name = str(candidate.relative_to(path))
        inside = any(name.startswith(f"{folder}/") for folder in names)
        if len(names) <= _MAX_LISTED and not inside and _is_checkpoint(candidate):
            names.append(name)
    return names


def foreign_weights(files: Sequence[str]) -> str:
    """Name the weights of a folder that are not in transformers' form, and what to do; "" if none.

    files: names relative to the folder
    """
    for pattern, advice in _FOREIGN:
        foreign = [name for name in files if re.fullmatch(pattern, name)]
        if foreign:
            torch = foreign[0].endswith(".bin")
            name = "pytorch_model.bin" if torch else "model.safetensors"
            return f"it holds {listed_shards(foreign)}, {advice.format(name=name)}"
    return ""


def listed_shards(files: Sequence[str]) -> str:
    return files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more shards"


def _below(path: Path) -> Iterator[Path]:
    """Files that may be a checkpoint, and folders; those within folders after all others."""
    folders: list[Path] = []
    for candidate in sorted(path.iterdir()):
        if candidate.is_dir():
            folders.append(candidate)
        elif is_packed(candidate) and not _LATER_PART.fullmatch(candidate.name):
            yield candidate
    folders = folders[:_MAX_FOLDERS]
    yield from folders
    for folder in folders:
        for candidate in sorted(folder.iterdir())[:_MAX_FOLDERS]:
            if candidate.is_dir() or is_packed(candidate):
                yield candidate
