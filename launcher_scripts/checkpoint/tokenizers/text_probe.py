"""Tokenizers and chat templates at work before anything is written, within limits.

Both come with checkpoints, and are a stranger's programs: a normalizer can double a text forty
times, an expression can take longer than the universe is old, a template can loop. So a tokenizer
is made, loaded and tried in a process of limited time and memory, and a template is rendered in
one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from launcher_scripts.checkpoint.formats.nemo_config import ADVICE
from launcher_scripts.checkpoint.tokenizers.huggingface_tokenizers import unified
from launcher_scripts.common.errors import CheckpointError, Problems, problem
from launcher_scripts.common.limited_process import LimitedProcesses, WorkLimitError, WorkLimits
from launcher_scripts.common.rendering import FAILURE, SYNTAX
from launcher_scripts.common.tokenizer import (
    Tokenizer,
    TokenizerError,
    is_of_library,
    load_tokenizer,
    special_tokens,
)

# The largest tokenizers, of 260,000 tokens, are made and loaded in ten seconds.
TOKENIZER_LIMITS = WorkLimits(cpu_seconds=60.0, seconds=900.0, memory_mib=4096)
TEMPLATE_LIMITS = WorkLimits(cpu_seconds=5.0, seconds=120.0, memory_mib=256)
# Compatibility forms make 11 bytes of one, and a byte is one id at most.
MAX_IDS_PER_BYTE = 16
MAX_CHARS = 1 << 20  # of a chat of a few words
# Long runs find an expression that tries them again from every start.
_RUN = 2000
TEXTS = (
    *(
        "Hello, world! 12345 caf\u00e9 \u6f22\u5b57 \U0001f642\t\n\r\n",
        "\ufdfa \ufb03 \u0130 \u00df",
    ),
    *(f"{character * _RUN}!" for character in "aA1 \n-_.e\u0301\u6f22"),
    *(f"{word * (_RUN // len(word))}!" for word in ("ab", "a ", "a1", "'s", "\r\n")),
)
_SAY = {"role": "user", "content": "Hello"}
CHATS = (
    [_SAY],
    [{"role": "system", "content": "Be brief."}, _SAY],
    [_SAY, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Go on."}],
)


def unified_files(files: Mapping[str, bytes], model_config: Mapping[str, Any]) -> dict[str, bytes]:
    """See huggingface_tokenizers.unified; made in a limited process."""
    with _written(files) as source, tempfile.TemporaryDirectory() as target:
        item = {"source": str(source), "target": target, "config": dict(model_config)}
        _work(item)
        return _read(Path(target))


def probed_tokenizer(files: Mapping[str, bytes]) -> Tokenizer:
    """The tokenizer of these files. Raises CheckpointError for one that exceeds its limits, that
    is damaged, or that reads a special token as other ids than its own.
    """
    with _written(files) as folder:
        _work({"source": str(folder)})
        return load_within_limits(folder)


def loaded_tokenizer(files: Mapping[str, bytes]) -> Tokenizer:
    """The tokenizer of files that probed_tokenizer has tried."""
    with _written(files) as folder:
        return load_within_limits(folder)


def load_within_limits(folder: Path) -> Tokenizer:
    """The tokenizer in a folder of the checkpoint's files. Raises CheckpointError."""
    try:
        return load_tokenizer(folder)
    except TokenizerError as error:
        reason = str(error).replace(str(folder), "the checkpoint")
        raise CheckpointError(problem(reason, change=ADVICE)) from error


def check_special_tokens(tokenizer: Tokenizer, files: Mapping[str, bytes]) -> None:
    """Refuse a tokenizer that reads a special token, written out, as other tokens than this one.

    files: those of the tokenizer, which name the tokens and perhaps their ids
    """
    problems = Problems("the tokenizer's special tokens")
    for token, token_id in special_tokens(files).items():
        ids = _encode(tokenizer, token)
        if len(ids) != 1 or token_id not in (None, ids[0]):
            expected = "one id" if token_id is None else f"[{token_id}]"
            problems.add(f"{token!r} is read as", got=ids[:16], choices=[expected], change=ADVICE)
    problems.raise_if_any(CheckpointError)


def check_templates(templates: Mapping[str, str]) -> None:
    """Raise CheckpointError for chat templates that are not Jinja or exceed their limits.

    What a template refuses by itself, such as a system's message, is its own affair.

    templates: name -> text
    """
    problems = Problems("the chat template")
    for name, text in templates.items():
        for messages in CHATS:
            values = {"messages": messages, "add_generation_prompt": True, "tools": None}
            item = {"template": text, "values": values, "max_chars": MAX_CHARS}
            try:
                result = _template_processes().call(item)
            except WorkLimitError as error:
                result = {SYNTAX: str(error)}
            too_long = str(MAX_CHARS) in result.get(FAILURE, "")
            if reason := result.get(SYNTAX) or (too_long and result[FAILURE]):
                problems.add(f"{name}: {reason}", change="chat_template of the checkpoint")
                break
    problems.raise_if_any(CheckpointError)


@cache
def _template_processes() -> LimitedProcesses:
    function = "launcher_scripts.common.rendering:make_renderer"
    return LimitedProcesses(function, None, TEMPLATE_LIMITS, 1)


@cache
def _tokenizer_processes() -> LimitedProcesses:
    return LimitedProcesses(f"{__name__}:make_worker", None, TOKENIZER_LIMITS, 1)


def _work(item: dict[str, Any]) -> None:
    """Have the process work on an item. Raises CheckpointError with its reason."""
    try:
        result = _tokenizer_processes().call(item)
    except WorkLimitError as error:
        message = f"the checkpoint's tokenizer exceeds a limit: {error}"
        raise CheckpointError(problem(message, change=ADVICE)) from error
    if result:
        raise CheckpointError(result["error"])


def make_worker(_argument: None) -> Callable[[dict[str, Any]], dict[str, str]]:
    """For LimitedProcesses: makes one tokenizer.json of the files in `source` and writes them to
    `target`, or without a target tries the tokenizer in `source`.
    """

    def work(item: dict[str, Any]) -> dict[str, str]:
        source = Path(item["source"])
        try:
            if "target" in item:
                _write(Path(item["target"]), unified(_read(source), item["config"]))
            else:
                _try(source)
        except (CheckpointError, ImportError) as error:
            return {"error": str(error)}
        return {}

    return work


def _try(folder: Path) -> None:
    tokenizer = load_within_limits(folder)
    check_special_tokens(tokenizer, _read(folder))
    for text in TEXTS:
        ids = _encode(tokenizer, text)
        limit = MAX_IDS_PER_BYTE * (1 + len(text.encode()))
        if len(ids) > limit:
            message = f"the tokenizer makes too many ids of {text[:16]!r} ({len(text)} characters)"
            raise CheckpointError(
                problem(message, got=len(ids), choices=[f"up to {limit}"], change=ADVICE)
            )


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text, which are also decoded. Raises CheckpointError where the library fails."""
    try:
        ids = tokenizer.encode(text)
        tokenizer.decode(ids)
    except BaseException as error:
        if isinstance(error, MemoryError) or not is_of_library(error):
            raise
        message = f"the tokenizer cannot read {text[:16]!r} ({len(text)} characters): {error}"
        raise CheckpointError(problem(message, change=ADVICE)) from error
    return ids


@contextmanager
def _written(files: Mapping[str, bytes]) -> Iterator[Path]:
    """A folder with these files, for as long as it is open."""
    with tempfile.TemporaryDirectory() as name:
        _write(Path(name), files)
        yield Path(name)


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)


def _read(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
