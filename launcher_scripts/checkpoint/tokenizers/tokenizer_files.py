"""The tokenizer that goes with an exported checkpoint: its files, and its start, end and pad ids.

The checkpoint's own files lie in its archive, where model_config.yaml names them. NeMo's
resharding script loses them, so a configuration can name others.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.nemo_config import (
    ADVICE,
    ARTIFACT,
    COMPANIONS,
    KEY,
    ROLES,
    SOURCE_SETS,
    find_name,
    named_files,
    no_tokenizer,
)
from launcher_scripts.checkpoint.tokenizers.huggingface_tokenizers import ADDED_TOKENS
from launcher_scripts.checkpoint.tokenizers.text_probe import (
    check_templates,
    loaded_tokenizer,
    probed_tokenizer,
    unified_files,
)
from launcher_scripts.common.errors import CheckpointError, Problems, problem
from launcher_scripts.common.files import mapping, parse_json, read_plain
from launcher_scripts.common.tokenizer import (
    CHAT_TEMPLATE_FILES,
    COMPANION_FILES,
    GENERATION_FILE,
    OPTIONAL_FILES,
    Tokenizer,
    chat_templates,
)
from launcher_scripts.common.tokenizer.libraries import BYTES_OF_CHARACTERS
from launcher_scripts.config.export import TokenizerSettings

_LISTED = 8  # tokens in a note
TEKKEN = "tekken.json"  # Mistral's, of byte pairs
# Its special tokens where the file does not list them; the others are fillers.
_TEKKEN_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
_TEKKEN_ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_MAX_TEKKEN = 1 << 22  # tokens
_TEMPLATE_FOLDER = "additional_chat_templates/"
# All but that of an mBART.
_PLAIN_SETS, FAIRSEQ_SETS = SOURCE_SETS[:-1], SOURCE_SETS[-1:]


@dataclass(frozen=True)
class TokenIds:
    """Special ids; None where there is no such token."""

    start_id: int | None
    end_id: int | None
    pad_id: int | None


# What a checkpoint may know better than its tokenizer: which ids the model was trained with.
TokenRule = Callable[[Tokenizer], TokenIds]
# (value in the configuration, what such a file is usually called) -> name and content
Find = Callable[[str, str], tuple[str, bytes] | None]


def collect_tokenizer(
    settings: TokenizerSettings, local_files: Callable[[], dict[str, bytes]]
) -> dict[str, bytes]:
    """Exported name -> content of the tokenizer's files; {} for `none`.

    local_files: gives those of the checkpoint
    Raises CheckpointError, naming the key that helps, when the files are not to be had.
    """
    if settings.source == "none":
        return {}
    return _named_files(settings) if settings.source == "files" else local_files()


def with_token_ids(
    config: Any,
    settings: TokenizerSettings,
    files: Mapping[str, bytes],
    *,
    has_ids: bool = False,
    rule: TokenRule | None = None,
) -> Any:
    """`config` with the tokenizer's start, end and pad ids, or those the settings say.

    Without a tokenizer the defaults stay, which are GPT-2's as in FasterTransformer's converter.
    A tokenizer without a start token starts with its end token, as GPT-2's does.

    has_ids: config has the model's own ids, and only the settings may change them
    rule:  the ids that the model was trained with, given the tokenizer; default: the tokenizer's
    Raises CheckpointError for a tokenizer that does not fit the model.
    """
    tokenizer = _probed(files) if files else None
    raw = None
    if tokenizer is not None:
        check_vocabulary(tokenizer, config.vocab_size)
    if tokenizer is not None and not has_ids:
        raw = (rule or tokenizer_ids)(tokenizer)
    token_ids = raw or TokenIds(None, None, None)
    end_id = _first(settings.end_id, token_ids.end_id)
    start_id = _first(settings.start_id, token_ids.start_id, None if has_ids else end_id)
    if raw is not None and end_id is None:
        raise CheckpointError(
            problem("the tokenizer has no token that ends a sequence", change=f"{KEY}.end_id")
        )
    return dataclasses.replace(
        config,
        start_id=_first(start_id, config.start_id),
        end_id=_first(end_id, config.end_id),
        pad_id=_first(settings.pad_id, token_ids.pad_id, config.pad_id),
    )


def missing_files(files: Mapping[str, bytes]) -> tuple[str, ...]:
    """Notes on what a tokenizer does not bring along; () for a model without one.

    Raises CheckpointError for files that are damaged.
    """
    if not files:
        return ()
    try:
        templates = chat_templates(files)
        parse_json(files.get(GENERATION_FILE, b"{}"))
    except ValueError as error:
        raise CheckpointError(f"the tokenizer's files are damaged: {error}") from error
    check_templates(templates)
    missing = {"chat template": not templates, GENERATION_FILE: GENERATION_FILE not in files}
    return tuple(f"the checkpoint has no {name}" for name, present in missing.items() if present)


def with_templates(files: dict[str, bytes], archive: Archive, folder: str) -> dict[str, bytes]:
    """`files` with the chat templates of a subfolder, in tokenizer_config.json.

    An exported folder has no subfolders. transformers reads the list there as well, but only
    without a chat_template.jinja, whose content moves there.
    """
    names = [name for name in archive.names() if name.startswith(folder)]
    further = {
        PurePosixPath(name).stem: archive.read(name).decode("utf-8")
        for name in names
        if name.endswith(".jinja")
    }
    if not further:
        return files
    raw = parse_json(files.get(OPTIONAL_FILES[1], b"{}"))
    templates = chat_templates(files) | further
    raw["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    content = json.dumps(raw, ensure_ascii=False, indent=2).encode()
    files_left = {name: files[name] for name in files if name not in CHAT_TEMPLATE_FILES}
    return files_left | {OPTIONAL_FILES[1]: content}


def with_class(files: dict[str, bytes], name: str) -> dict[str, bytes]:
    """`files` with a tokenizer_class in tokenizer_config.json, which the first checkpoints lack."""
    raw = parse_json(files.get(OPTIONAL_FILES[1], b"{}"))
    content = json.dumps({"tokenizer_class": name, **raw}, ensure_ascii=False, indent=2).encode()
    return files | {OPTIONAL_FILES[1]: content}


def check_vocabulary(tokenizer: Tokenizer, rows: int) -> None:
    """Refuse a tokenizer that cuts texts into ids that the model has no row for.

    Added tokens may have such ids: a prompt that contains one is refused when it comes. Rows
    without a token are padding.

    rows: of the embedding table
    """
    beyond = range(rows, tokenizer.vocab_size)
    if not all(map(tokenizer.is_added, beyond)):
        raise CheckpointError(
            problem(
                f"the tokenizer has more tokens than the model's {rows}",
                got=tokenizer.vocab_size,
                change=ADVICE,
            )
        )


def tokens_beyond(files: Mapping[str, bytes], rows: int) -> tuple[str, ...]:
    """A note on the tokens that the model has no row for; () without such.

    files: as with_token_ids has checked them;  rows: of the embedding table
    """
    tokenizer = loaded_tokenizer(files) if files else None
    beyond = () if tokenizer is None else range(rows, tokenizer.vocab_size)
    if tokenizer is None or not beyond:
        return ()
    names = [tokenizer.token_bytes(token).decode(errors="replace") for token in beyond[:_LISTED]]
    more = f" and {len(beyond) - _LISTED} more" if len(beyond) > _LISTED else ""
    return (
        f"the model has no row for the tokens {', '.join(names)}{more} (ids from {rows} on): "
        "a prompt that contains one is refused",
    )


def tokenizer_ids(tokenizer: Tokenizer) -> TokenIds:
    return TokenIds(tokenizer.start_id, tokenizer.end_id, tokenizer.pad_id)


def _first(*values: int | None) -> Any:
    return next((value for value in values if value is not None), None)


def _probed(files: Mapping[str, bytes]) -> Tokenizer:
    tokenizer = probed_tokenizer(files)
    if not tokenizer.vocab_size:
        raise CheckpointError(
            problem("the tokenizer has no tokens", got=sorted(files), change=ADVICE)
        )
    return tokenizer


def _named_files(settings: TokenizerSettings) -> dict[str, bytes]:
    problems = Problems("the tokenizer's files")
    files: dict[str, bytes] = {}
    for role, (stem, _) in ROLES.items():
        name = getattr(settings, role)
        if not name:
            continue
        path = Path(name)
        try:
            files[stem + path.suffix] = read_plain(path)
        except OSError as error:
            problems.add(f"cannot read it: {error.strerror}", got=name, change=f"{KEY}.{role}")
            continue
        for companion in (*COMPANION_FILES, ADDED_TOKENS):
            companion_path = path.with_name(companion)
            if companion_path.is_file():
                files[companion] = read_plain(companion_path)
    if not files and not problems.messages:
        problems.add("no file is named", change=ADVICE)
    problems.raise_if_any(CheckpointError)
    if "tokenizer.json" in files or b'"tokenizer_class"' in files.get(OPTIONAL_FILES[1], b""):
        return unified_files(files, {})
    # NeMo and Megatron-LM read these files alone.
    return {name: files[name] for name in files if name not in (*OPTIONAL_FILES, ADDED_TOKENS)}


def nemo_files(raw: Mapping[str, Any], origin: Path, find: Find) -> dict[str, bytes]:
    """The files that section `tokenizer` names, with chat template and generation defaults.

    raw:    model_config.yaml
    origin: the checkpoint, for errors
    find:   gets such a file, see archived and beside
    """
    files = {
        ROLES[role][0] + PurePosixPath(name).suffix: content
        for role, (name, content) in named_files(raw, origin, find).items()
    }
    section = raw["tokenizer"]
    for key, name in COMPANIONS.items():
        value = section.get(key)
        if isinstance(value, str) and value.startswith(ARTIFACT):
            files[name] = _companion(value, f"tokenizer.{key} of {origin}", find)
        elif isinstance(value, str) and name in CHAT_TEMPLATE_FILES:
            files[name] = value.encode()  # NeMo's own key holds the text itself
    special = section.get("special_tokens")
    if "tokenizer.json" in files and isinstance(special, dict):
        files[OPTIONAL_FILES[0]] = json.dumps(special).encode()
    return unified_files(files, {}) if "tokenizer.json" in files else files


def _companion(value: str, key: str, find: Find) -> bytes:
    """The content of an artifact. Raises CheckpointError where it is lost."""
    match = find(value, PurePosixPath(value.removeprefix(ARTIFACT)).name)
    if match is None:
        raise CheckpointError(problem(f"{key} names a file that is not there", got=value))
    return match[1]


def archived(archive: Archive, root: str, value: str, pattern: str) -> tuple[str, bytes] | None:
    """The member below `root` meant by `value`, lost ones by their kind: name and content.

    Never a file outside of the archive.
    """
    names = [name.removeprefix(root) for name in archive.names() if name.startswith(root)]
    name = find_name(names, value, pattern)
    return None if name is None else (root + name, archive.read(root + name))


def next_to(folder: Path, value: str, _pattern: str) -> tuple[str, bytes] | None:
    """The file that a training's hyperparameters in `folder` name: where it was, or beside them."""
    for path in (folder / value, folder / PurePosixPath(value).name):
        if path.is_file():
            return path.name, path.read_bytes()
    return None


def has_plain(archive: Archive, root: str) -> bool:
    """Return whether plain_files finds a tokenizer in that folder."""
    names = archive.names()
    return any(all(root + name in names for name in requested) for requested in _PLAIN_SETS)


def tekken_files(content: bytes, origin: str) -> dict[str, bytes]:
    """Return tokenizer.json and tokenizer_config.json of Mistral's file of byte pairs, whose
    special tokens come first, and whose text starts with <s>.

    Raises CheckpointError for a file that is damaged.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
    from tokenizers.models import BPE

    try:
        ranks, special, pattern = _tekken_parts(mapping(parse_json(content)))
        letters = {byte: letter for letter, byte in BYTES_OF_CHARACTERS.items()}
        texts = {token: "".join(map(letters.__getitem__, token)) for token in ranks}
        vocabulary = {texts[token]: len(special) + rank for token, rank in ranks.items()}
        pairs = sorted(
            (rank, ranks[token[:cut]], ranks[token[cut:]], texts[token[:cut]], texts[token[cut:]])
            for token, rank in ranks.items()
            for cut in range(1, len(token))
            if token[:cut] in ranks and token[cut:] in ranks
        )
        merges = [(left, right) for *_, left, right in pairs]
        names = {name: number for number, name in enumerate(special)}
        tokenizer = Tokenizer(BPE({**names, **vocabulary}, merges, ignore_merges=True))
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        pairs_of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pairs_of_bytes])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{origin} is damaged: {error}") from error
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in special]
    )
    start = [("<s>", names["<s>"])]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", start)
    roles = _TEKKEN_ROLES | ({"pad_token": "<pad>"} if "<pad>" in names else {})
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **roles}
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        OPTIONAL_FILES[1]: json.dumps(config, indent=2).encode(),
    }


def _tekken_parts(raw: Mapping[str, Any]) -> tuple[dict[bytes, int], list[str], str]:
    """Bytes of a token -> its rank, the special tokens, and the expression that cuts texts.

    Raises ValueError, KeyError or TypeError for a file that is damaged.
    """
    config = mapping(raw["config"])
    size, count = config["default_vocab_size"], config["default_num_special_tokens"]
    if type(size) is not int or type(count) is not int or not 2 < count < size < _MAX_TEKKEN:
        raise ValueError(f"its sizes are {size!r} and {count!r}")
    ranks: dict[bytes, int] = {}
    for entry in raw["vocab"]:
        if entry["rank"] < size - count:
            ranks[base64.b64decode(entry["token_bytes"], validate=True)] = entry["rank"]
    if sorted(ranks.values()) != [*range(size - count)] or not all(
        bytes([byte]) in ranks for byte in range(256)
    ):
        raise ValueError("its vocabulary has not every rank and every byte")
    special = [f"<SPECIAL_{number}>" for number in range(count)]
    listed = raw.get("special_tokens")
    for number, entry in enumerate(_TEKKEN_TOKENS[:count] if listed is None else listed):
        rank, text = (number, entry) if listed is None else (entry["rank"], entry["token_str"])
        if type(rank) is not int or not 0 <= rank < count or not isinstance(text, str):
            raise ValueError(f"a special token is {entry!r}")
        special[rank] = text
    if len({*special}) != count or not {*_TEKKEN_ROLES.values()} <= {*special}:
        raise ValueError("its special tokens are not complete, or not different")
    return ranks, special, str(config["pattern"])


def _reject_special_files(archive: Archive, root: str, names: Iterable[str]) -> None:
    """Raise CheckpointError for a pipe, a device or a broken link where a file would be read."""
    problems = Problems(f"the tokenizer's files in {archive.path}")
    for name in sorted({*names, *COMPANION_FILES, ADDED_TOKENS}):
        path = archive.path / root / name
        if archive.path.is_dir() and os.path.lexists(path) and not path.is_file():
            problems.add(f"{root}{name} is not a plain file")
    problems.raise_if_any(CheckpointError)


def plain_files(
    archive: Archive,
    root: str = "",
    more: Sequence[Mapping[str, str]] = (),
    config: Mapping[str, Any] | None = None,
) -> dict[str, bytes]:
    """The files of a Hugging Face or Megatron-LM folder, by their usual names below `root`, or in
    the nearest folder above that has some.

    Where they name the tokenizer's class, or transformers chooses it, they become one file.

    more:   sets that the model may have, too
    config: config.json; None for a folder that has none
    """
    names, sets = archive.names(), (*_PLAIN_SETS, *more)
    while root and not has_plain(archive, root):
        root = root[: root.rstrip("/").rfind("/") + 1]
    _reject_special_files(archive, root, {name for names_of_set in sets for name in names_of_set})
    for requested in sets:
        if all(root + name in names for name in requested):
            files = {exported: archive.read(root + name) for name, exported in requested.items()}
            default_names = (*COMPANION_FILES, ADDED_TOKENS)
            companions = [name for name in default_names if root + name in names]
            files |= {name: archive.read(root + name) for name in companions}
            files = with_templates(files, archive, root + _TEMPLATE_FOLDER)
            is_complete = config is not None or OPTIONAL_FILES[1] in files
            return unified_files(files, config or {}) if is_complete else files
    if root + TEKKEN in names:
        files = tekken_files(archive.read(root + TEKKEN), f"{root}{TEKKEN} of {archive.path}")
        companions = [name for name in COMPANION_FILES if root + name in names]
        return files | {name: archive.read(root + name) for name in companions}
    foreign = [name for name in names if re.fullmatch(r"tekken.*\.json|.*\.tiktoken", name)]
    raise CheckpointError(no_tokenizer(archive.path, sets, foreign))
