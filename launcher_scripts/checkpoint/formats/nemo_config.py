"""model_config.yaml of a NeMo checkpoint: where it lies, its sizes, and tokenizer files it names.

The login side looks at it, so that a size that cannot work is found before a job waits for it;
the converter finds and reads it by the same rules. Neither numpy nor torch is needed here.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from launcher_scripts.common.errors import CheckpointError, problem
from launcher_scripts.common.files import (
    MAX_YAML_BYTES,
    mapping,
    open_plain,
    open_tar,
    parse_json,
    parse_yaml,
    read_plain,
    tar_members,
)
from launcher_scripts.common.parallelism import divisors
from launcher_scripts.common.tokenizer import (
    CHAT_TEMPLATE_FILES,
    GENERATION_FILE,
    OPTIONAL_FILES,
    is_byt5,
)

CONFIG_NAME = "model_config.yaml"
# In place of the sizes of a model: a prompt's or an adapter's.
_PARTS = ("language_model_path", "peft")
PART_ADVICE = (
    "a prompt or an adapter, not a model: name it in export.model.prompt_checkpoints, "
    "ia3_checkpoints, adapter_checkpoints or lora_checkpoints, and its model here"
)
_DEPTH = 3  # of folders in a checkpoint that are looked into


@dataclass(frozen=True)
class NemoSizes:
    """Sizes that decide how a model can be divided; None if the configuration lacks them."""

    num_layers: int | None
    num_heads: int | None
    ffn_size: int | None

    def tp_sizes(self) -> list[int] | None:
        """The tensor-parallel sizes that divide the heads and the MLP."""
        sizes = [size for size in (self.num_heads, self.ffn_size) if size]
        return divisors(gcd(*sizes)) if self.num_heads else None


def find_nemo_file(path: Path) -> Path:
    """`path`, or the one .nemo file in it where it is a folder of checkpoints.

    Raises CheckpointError when several files could be meant.
    """
    try:
        if not path.is_dir() or (path / CONFIG_NAME).exists():
            return path
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    archives = sorted(path.glob("*.nemo"))
    if len(archives) > 1:
        names = ", ".join(file.name for file in archives)
        raise CheckpointError(f"{path} holds several checkpoints, name one of them: {names}")
    return archives[0] if archives else path


def is_config(name: str) -> bool:
    """Return whether a file of a checkpoint, in any of its folders, is its model_config.yaml."""
    return PurePosixPath(name).name == CONFIG_NAME


def parse_config(text: bytes, message: str) -> dict[str, Any]:
    """The hyperparameters in a model_config.yaml. message: the file, for errors."""
    try:
        return mapping(parse_yaml(text))
    except ValueError as error:
        raise CheckpointError(f"{message} is damaged: {error}") from error


def section(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A part of the file; an empty one where it has none."""
    value = raw.get(key)
    return value if isinstance(value, Mapping) else {}


def read_nemo_sizes(path: Path) -> NemoSizes | None:
    """The sizes of a .nemo file or an unpacked folder; None when `path` is neither.

    Raises CheckpointError when the file is broken, or is a part of a model.
    """
    result = read_nemo_config(path)
    if result is None:
        return None
    _, raw = result
    # Both stacks of a T5 are divided alike.
    config = raw["encoder"] if isinstance(raw.get("encoder"), dict) else raw
    sizes = NemoSizes(
        _size(config, "num_layers"),
        _size(config, "num_attention_heads"),
        _size(config, "ffn_hidden_size"),
    )
    if sizes.num_layers is sizes.num_heads is None and any(key in raw for key in _PARTS):
        raise CheckpointError(f"{path} is {PART_ADVICE}")
    return sizes


def read_nemo_config(path: Path) -> tuple[str, dict[str, Any]] | None:
    """The folder of model_config.yaml in a .nemo file or an unpacked one ("" or ending in `/`),
    and what it says; None when `path` is neither.

    Raises CheckpointError when the file is broken.
    """
    try:
        config = _read_folder(path) if path.is_dir() else _read_file(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path} as a .nemo file: {error}") from error
    if config is None:
        return None
    name, text = config
    return name.removesuffix(CONFIG_NAME), parse_config(text, f"{name} of {path}")


def is_packed(path: Path) -> bool:
    """True if a path is a file that holds a whole checkpoint: a .nemo file, whatever its name, or
    a GGUF file.
    """
    if not path.is_file():
        return False
    if path.suffix in (".nemo", ".gguf"):
        return True
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    return is_gguf or (_is_tar(path) and _has_config(path))


def _is_tar(path: Path) -> bool:
    """True for a tar archive, packed by gzip or not, by its first bytes."""
    with path.open("rb") as file:
        start = file.read(512)
    return start[257:262] == b"ustar" or start[:2] == b"\x1f\x8b"


def _has_config(path: Path) -> bool:
    try:
        return _read_file(path) is not None
    except (CheckpointError, OSError, ValueError):
        return False


def folders(path: Path) -> Iterator[str]:
    """The folders of a checkpoint, itself as ".", relative to it."""
    for folder, below, _ in os.walk(path):
        relative = os.path.relpath(folder, path)
        yield relative
        if len(Path(relative).parts) >= _DEPTH:
            below.clear()


def _read_folder(path: Path) -> tuple[str, bytes] | None:
    """Name and content; None where there is none, or more than one, which the converter refuses."""
    names = (str(PurePosixPath(folder, CONFIG_NAME)) for folder in folders(path))
    here = (path / CONFIG_NAME).exists()
    names_present = [CONFIG_NAME] if here else [name for name in names if (path / name).is_file()]
    return (
        (names_present[0], read_plain(path / names_present[0])) if len(names_present) == 1 else None
    )


def _read_file(path: Path) -> tuple[str, bytes] | None:
    if path.suffix != ".nemo" and path.is_file() and not _is_tar(path):
        return None
    with open_plain(path) as file, open_tar(file, "r:*") as archive:
        for member in tar_members(archive):
            if not is_config(member.name):
                continue
            stream = archive.extractfile(member) if member.isreg() else None
            if stream is None or member.size > MAX_YAML_BYTES:
                raise CheckpointError(f"{CONFIG_NAME} of {path} is not a plain, small file")
            return str(PurePosixPath(member.name)), stream.read()
    raise CheckpointError(f"{path} has no {CONFIG_NAME}: it is not a NeMo checkpoint")


def _size(config: dict[str, Any], name: str) -> int | None:
    value = config.get(name)
    return value if type(value) is int and value > 0 else None


KEY = "export.model.tokenizer"
ADVICE = f"{KEY}: name the files (model, or vocab_file and merge_file), or none"

# Key of model_config.yaml and of the settings -> stem of the exported file, and what the file is
# usually called.
ROLES = {
    "model": ("tokenizer", "*.model"),
    "vocab_file": ("vocab", "*vocab*"),
    "merge_file": ("merges", "*merge*.txt"),
}
# Further keys of section `tokenizer` that may name an artifact, as `nemo:<name>` -> exported file.
COMPANIONS = {
    "tokenizer_config": OPTIONAL_FILES[1],
    "chat_template": CHAT_TEMPLATE_FILES[0],
    "generation_config": GENERATION_FILE,
}
ARTIFACT = "nemo:"
# Name in a folder of another tool -> exported name, best set first. The last one is an mBART's,
# whose ids follow from it; XGLM's file of that name has other ids than the model.
SOURCE_SETS: tuple[Mapping[str, str], ...] = (
    {"tokenizer.json": "tokenizer.json"},
    {"spiece.model": "tokenizer.model"},
    {"tokenizer.model": "tokenizer.model"},
    {"vocab.json": "vocab.json", "merges.txt": "merges.txt"},
    {"gpt2-vocab.json": "vocab.json", "gpt2-merges.txt": "merges.txt"},
    {"vocab.json": "vocab.json", "source.spm": "source.spm"},
    {"vocab.json": "vocab.json", "sentencepiece.bpe.model": "sentencepiece.bpe.model"},
    {"sentencepiece.bpe.model": "sentencepiece.bpe.model"},
)
# What only folders of transformers and of Megatron-LM and its kin hold, and what is in one of the
# latter or below.
_INDICATORS = ("config.json", "latest_checkpointed_iteration.txt")
# A rank's weights, with its optimizer's state or, from the first distributed optimizers, without.
MEGATRON_FILES = ("model_optim_rng.pt", "model_rng.pt")
_INNER_INDICATORS = (_INDICATORS[1], ".metadata", *MEGATRON_FILES)
# What lies behind so much of a compressed archive is left to the conversion.
_MAX_DECOMPRESSED_BYTES = 2**30
Match = TypeVar("Match")


def named_files(
    config: Mapping[str, Any], origin: Path, find: Callable[[str, str], Match | None]
) -> dict[str, Match]:
    """Role -> what `find` gives for the file that section `tokenizer` names.

    config: model_config.yaml
    origin: the checkpoint, for errors
    find:   (value, what such a file is usually called) -> the file; None where it is not there
    Raises CheckpointError where a file is lost, or none is named.
    """
    settings = section(config, "tokenizer")
    values = {role: settings.get(role) for role in ROLES}
    named = {role: value for role, value in values.items() if isinstance(value, str) and value}
    files = {role: find(value, ROLES[role][1]) for role, value in named.items()}
    lost = [value for role, value in named.items() if files[role] is None]
    if lost or not named:
        kind = settings.get("type") or settings.get("library") or "unknown"
        raise CheckpointError(
            problem(
                f"{origin} does not hold its tokenizer's files ({kind})",
                got=lost or "no file is named",
                change=ADVICE,
            )
        )
    return {role: file for role, file in files.items() if file is not None}


def find_name(names: Iterable[str], value: str, pattern: str) -> str | None:
    """The name meant by `value` among those beside model_config.yaml; a lost one by its kind."""
    base = PurePosixPath(value.removeprefix(ARTIFACT)).name
    top_level = [name for name in names if "/" not in name]
    for glob in (base, f"*_{base}", pattern):
        matching = [name for name in top_level if fnmatch.fnmatchcase(name, glob)]
        if len(matching) == 1:
            return matching[0]
    return None


def check_source_tokenizer(path: Path) -> None:
    """Raises CheckpointError when a checkpoint lacks its tokenizer's files: a .nemo file, an
    unpacked one, or a folder of transformers or Megatron-LM."""
    result = None
    if not any((path / mark).is_file() for mark in _INDICATORS):
        result = read_nemo_config(path)
        if result is None and not _is_megatrons(path):
            return
    if result is None:
        if not any(_is_complete(path / folder) for folder in folders(path)):
            raise CheckpointError(no_tokenizer(path, SOURCE_SETS))
        return
    root, config = result
    names = _names(path, root)
    if names is not None:
        named_files(config, path, lambda value, pattern: find_name(names, value, pattern))


def no_tokenizer(path: Path, sets: Iterable[Iterable[str]], foreign: Sequence[str] = ()) -> str:
    """Say that a checkpoint has no tokenizer, and where its files may come from.

    sets: names of files that are one together;  foreign: files of forms that are not read
    """
    suffix = f"; {', '.join(foreign)} must be converted first" if foreign else ""
    return problem(
        f"{path} holds no tokenizer{suffix}; put the files of one of these sets into that folder",
        choices=[" + ".join(names) for names in sets],
        change=ADVICE,
    )


def _is_megatrons(path: Path) -> bool:
    """True if a folder, or one within it, is a checkpoint of Megatron-LM or its kin."""
    return path.is_dir() and any(
        (path / folder / mark).is_file() for folder in folders(path) for mark in _INNER_INDICATORS
    )


def _is_complete(folder: Path) -> bool:
    if any(all((folder / name).is_file() for name in names) for names in SOURCE_SETS):
        return True
    configs = (folder / name for name in (_INDICATORS[0], OPTIONAL_FILES[1]))
    return (folder / OPTIONAL_FILES[1]).is_file() and is_byt5(
        *(values for path in configs if isinstance(values := _json_of(path), dict))
    )


def _json_of(path: Path) -> Any:
    try:
        return parse_json(read_plain(path))
    except (OSError, ValueError):
        return None


def _names(path: Path, root: str) -> list[str] | None:
    """The names in folder `root` of a checkpoint; None where finding them would take long."""
    if path.is_dir():
        return [entry.name for entry in (path / root).iterdir()]
    try:
        with open_plain(path) as file, open_tar(file, "r:*") as archive:
            compressed = archive.fileobj is not file
            names = []
            for member in tar_members(archive):
                name = str(PurePosixPath(member.name))
                if name.startswith(root):
                    names.append(name.removeprefix(root))
                if compressed and archive.offset > _MAX_DECOMPRESSED_BYTES:
                    return None
            return names
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path} as a .nemo file: {error}") from error
