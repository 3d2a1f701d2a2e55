"""The files of a Hugging Face folder that hold its weights, and their tensors by name.

A folder may hold one set of weights per format. transformers prefers safetensors, and a single file
to an index; where a single file stands next to the shards of an index, one of them is a leftover of
another save, and nothing says which.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from launcher_scripts.checkpoint.formats import safetensors_file, torch_file
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.source_tensor import SourceTensor
from launcher_scripts.checkpoint.sources.renaming import renamed, unwrapped
from launcher_scripts.common.errors import CheckpointError, Problems, problem
from launcher_scripts.common.untrusted import mapping, parse_json
from launcher_scripts.config.settings import CHECKPOINT_KEY

_MAX_LISTED = 5
_WEIGHTS = re.compile(r"(?!training_args)[^/]+\.(?:safetensors|bin|pth|pt|msgpack|h5|gguf)")
_LFS_POINTER = b"version https://git-lfs"
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


def read_mapping(archive: Archive, name: str) -> dict[str, Any]:
    """A JSON file of a folder. Raises CheckpointError for one that is damaged or no mapping."""
    try:
        return mapping(parse_json(archive.read(name)))
    except ValueError as error:
        raise CheckpointError(f"{name} of {archive.path} is damaged: {error}") from error


def weight_files(archive: Archive, names: Sequence[str], notes: list[str]) -> list[str]:
    """The files that hold the weights.

    names: what a single file is called, by format, first choice first
    notes: gets what was ignored
    Raises CheckpointError where there are none, two sets, or a set that is not complete.
    """
    present = set(archive.names())
    chosen: list[str] = []
    stale: dict[str, list[str]] = {}
    for name in names:
        shards = _shards(archive, f"{name}.index.json") if f"{name}.index.json" in present else []
        found = [shard for shard in shards if shard in present]
        single = [name] if name in present else []
        if shards and not found:
            stale[f"{name}.index.json"] = shards
        if not chosen and (single or found):
            chosen = _one_set(archive, name, single, shards if found else [])
    if not chosen:
        _refuse_missing(archive, names, stale)
    if stale:
        notes.append(f"{', '.join(stale)} is ignored: none of its files exist")
    ignored = [each for each in sorted(present) if _WEIGHTS.fullmatch(each) and each not in chosen]
    if ignored:
        listed = ", ".join(ignored[:_MAX_LISTED]) + (", ..." if ignored[_MAX_LISTED:] else "")
        notes.append(f"the weights are read from {_listed(chosen)}; not read: {listed}")
    return chosen


def _listed(files: Sequence[str]) -> str:
    return files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more shards"


def _shards(archive: Archive, index: str) -> list[str]:
    try:
        weight_map = mapping(read_mapping(archive, index)["weight_map"])
        shards = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} of {archive.path} is damaged: {error!r}") from error
    if not shards or not all(isinstance(shard, str) for shard in shards):
        raise CheckpointError(f"{index} of {archive.path} is damaged: it names no files")
    return shards


def _one_set(
    archive: Archive, name: str, single: Sequence[str], shards: Sequence[str]
) -> list[str]:
    """The single file or the index's shards, of which some exist."""
    index = f"{name}.index.json"
    problems = Problems(f"{index} of {archive.path}")
    if single and shards and {*single} != {*shards}:
        raise CheckpointError(
            problem(
                f"{archive.path} holds two sets of weights: {name}, and {index} with "
                f"{_listed(shards)}",
                choices=["one of them: remove the leftover of another save"],
                change=CHECKPOINT_KEY,
            )
        )
    for shard in shards:
        if shard not in archive.names():
            problems.add("a shard is missing", got=shard)
    problems.raise_if_any(CheckpointError)
    return [*(shards or single)]


def _refuse_missing(
    archive: Archive, names: Sequence[str], stale: Mapping[str, Sequence[str]]
) -> None:
    problems = Problems(f"the weights of {archive.path}")
    for index, shards in stale.items():
        missing = ", ".join(shards[:_MAX_LISTED]) + (", ..." if shards[_MAX_LISTED:] else "")
        problems.add(f"{index} names shards, and a shard is missing, as are all", got=missing)
    hint = foreign_weights(archive.names())
    if hint:
        problems.add(hint, change=CHECKPOINT_KEY)
    if not problems.messages:
        choices = [*names, *(f"{name}.index.json" for name in names)]
        problems.add(f"{archive.path} holds no weights", choices=choices)
    problems.raise_if_any(CheckpointError)


def foreign_weights(files: Sequence[str]) -> str:
    """Which weights a folder holds that are not in transformers' form, and what to do; "" if none.

    files: names relative to the folder
    """
    for pattern, advice in _FOREIGN:
        there = [name for name in files if re.fullmatch(pattern, name)]
        if there:
            torch = there[0].endswith(".bin")
            name = "pytorch_model.bin" if torch else "model.safetensors"
            return f"it holds {_listed(there)}, {advice.format(name=name)}"
    return ""


def read_tensors(
    archive: Archive,
    files: Sequence[str],
    rename: Callable[[str], str | None],
    notes: list[str],
) -> dict[str, SourceTensor]:
    """New name -> tensor, of all files.

    rename: a name, without the modules that a training puts around the model -> its new name; None
            for a tensor that is not needed
    notes:  gets which modules these were
    Raises CheckpointError for what is damaged, or two tensors of one new name.
    """
    removed: set[str] = set()

    def triples() -> Iterator[tuple[str, str, SourceTensor]]:
        for file in files:
            for key, values in _state_dict(archive, file).items():
                plain, modules = unwrapped(key)
                name = rename(plain)
                if name is not None:
                    removed.update({modules} if modules else ())
                    source = key if len(files) == 1 else f"{key} ({file})"
                    yield source, name, SourceTensor.whole(values)

    tensors = renamed(triples(), str(archive.path))
    if removed:
        notes.append(f"names of tensors: {', '.join(sorted(removed))} is removed from their front")
    return tensors


def _state_dict(archive: Archive, file: str) -> dict[str, NDArray[Any]]:
    origin, region = f"{file} of {archive.path}", archive.region(file)
    if region.part(0, min(region.size, len(_LFS_POINTER))).bytes() == _LFS_POINTER:
        raise CheckpointError(
            f"{origin} is a pointer of git-lfs, not the weights; expected the file itself; "
            "run `git lfs pull` in the repository, or download it with huggingface-cli"
        )
    load = safetensors_file.load if file.endswith(".safetensors") else torch_file.load_state
    tensors = dict(torch_file.tensors_of(load(region, origin).items(), origin))
    if not tensors:
        raise CheckpointError(f"{origin} holds no state dict")
    return tensors
