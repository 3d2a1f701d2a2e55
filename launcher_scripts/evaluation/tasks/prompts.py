"""Items as prompts, prompts as rows of token ids, and the answers as text; and the folder
evaluate.tokenizer_dir: a tokenizer, and config.ini where it is the checkpoint's.
"""

from __future__ import annotations

import configparser
import gzip
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher_scripts.common.errors import ConfigError, Problems, ServerError, problem
from launcher_scripts.common.files import read_plain
from launcher_scripts.common.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from launcher_scripts.config.evaluation import GenerationSettings, TaskSettings
from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.evaluation.tasks.task import EvaluatedModel, ProgressCallback
from launcher_scripts.models.repository import FILE_NAME, parse_ini

KEY = "evaluate.tokenizer_dir"


def read_model_ini(folder: Path) -> configparser.RawConfigParser:
    """The sections of `folder`/config.ini; none where there is no such file.

    Raises ConfigError for one that cannot be read.
    """
    path = folder / FILE_NAME
    try:
        return parse_ini(read_plain(path).decode() if path.exists() else "")
    except (OSError, UnicodeDecodeError, configparser.Error) as error:
        raise ConfigError(problem(f"cannot read {path}: {error}", change=KEY)) from error


def read_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer. Raises ConfigError where it has none, or a damaged one."""
    try:
        return load_tokenizer(folder)
    except TokenizerError as error:
        raise ConfigError(problem(str(error), change=KEY)) from error


def read_vocab_size(folder: Path) -> int:
    """Return the vocabulary size of the model in `folder`: config.ini's, else the tokenizer's."""
    config = read_model_ini(folder)
    for section in config.values():
        if "vocab_size" in section:
            return int(section["vocab_size"])
    try:
        return load_tokenizer(folder).vocab_size
    except TokenizerError as error:
        raise ConfigError(
            problem(
                f"{folder} says no vocabulary size, neither by a config.ini nor by a tokenizer: "
                f"{error}",
                change=KEY,
            )
        ) from error


_FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class TaskPrompt:
    """One item's prompt; ending: what stands behind its longest field, which is never cut off."""

    text: str
    ending: str = ""


def row_of(
    model: EvaluatedModel,
    prompt: TaskPrompt,
    settings: GenerationSettings,
    virtual: tuple[int, ...],
) -> GenerateRequest:
    """One prompt, behind the ids of a learned one, as a row; greedy, or of `beam_width` beams."""
    ids = tuple(model.tokenizer.encode(prompt.text))
    if settings.max_input_len is not None:
        num_special = len(model.special.surround(()))
        max_tokens = max(0, settings.max_input_len - num_special - len(virtual))
        num_suffix = len(model.tokenizer.encode(prompt.ending)) if prompt.ending else 0
        ids = shortened(ids, max_tokens, num_suffix)
    return GenerateRequest(
        (*virtual, *model.special.surround(ids)),
        settings.output_len,
        SamplingParameters(beam_width=settings.beam_width, len_penalty=settings.len_penalty),
        prompt_task=settings.prompt_task,
        ia3_task=settings.ia3_task,
        lora_adapter=settings.lora_adapter,
        decoder_input_ids=model.special.decoder,
    )


def shortened(ids: tuple[int, ...], max_tokens: int, num_suffix: int) -> tuple[int, ...]:
    """At most `max_tokens` of the ids; what is cut off stands before the last `num_suffix`."""
    if len(ids) <= max_tokens:
        return ids
    num_suffix = min(num_suffix, max_tokens)
    return (*ids[: max_tokens - num_suffix], *ids[len(ids) - num_suffix :])


def generate_texts(
    model: EvaluatedModel,
    prompts: Sequence[TaskPrompt],
    settings: TaskSettings,
    progress: ProgressCallback,
) -> list[str]:
    """Generate a continuation of every prompt."""
    task = settings.generation.prompt_task
    virtual = () if task is None else read_virtual_tokens(model.folder, task)
    rows = [row_of(model, prompt, settings.generation, virtual) for prompt in prompts]
    texts: list[str] = []

    def send(first: int) -> Iterator[str]:
        for output in model.model.generate_rows(rows[first:], settings.batch_size):
            yield model.tokenizer.decode(output.output_ids).strip()

    try:
        for text in model.continued(send):
            texts.append(text)
            progress(len(texts), len(rows))
    except ServerError as error:
        index = len(texts)
        item_text = f"{settings.name}'s item {index} ({len(rows[index].input_ids)} tokens)"
        raise ServerError(f"no answer to {item_text}: {error}") from error
    return texts


def fill_template(template: str, fields: Mapping[str, str], key: str) -> str:
    """The template with every {name} replaced by that field, whatever braces the fields hold."""
    unknown = sorted(set(_FIELD.findall(template)) - set(fields))
    if unknown:
        raise ConfigError(
            problem("the template names fields that items do not have", got=unknown)
            + f"; choices: {', '.join(fields)}; change {key}"
        )
    return _FIELD.sub(lambda match: fields[match[1]], template)


def prompts_of(
    settings: TaskSettings, default: str, items: Iterable[Mapping[str, str]], longest: str
) -> list[TaskPrompt]:
    """Every item's prompt, by the settings' template or the task's own.

    longest: the field that is shortened where max_input_len asks for it
    """
    template_text = settings.generation.template
    template = default if template_text is None else template_text
    key = f"evaluate.tasks.{settings.name}.generation.template"
    _, has_field, ending = template.rpartition(f"{{{longest}}}")
    return [
        TaskPrompt(
            fill_template(template, fields, key),
            fill_template(ending, fields, key) if has_field else "",
        )
        for fields in items
    ]


def read_virtual_tokens(folder: Path, task: int) -> tuple[int, ...]:
    """The ids of a learned prompt, which stand in front of every prompt, by the checkpoint's
    config.ini.
    """
    start_key = "prompt_learning_start_id"
    config = read_model_ini(folder)
    section = config[f"task_{task}"] if config.has_section(f"task_{task}") else {}
    starts = [part[start_key] for part in config.values() if start_key in part]
    if "prompt_length" not in section or not starts:
        task_sections = [name for name in config.sections() if name.startswith("task_")]
        raise ConfigError(
            problem(
                f"{folder / 'config.ini'} has no learned prompt task_{task}",
                choices=task_sections,
                change="evaluate.tasks.<task>.generation.prompt_task (null: the model as it is), "
                "evaluate.tokenizer_dir",
            )
        )
    start = int(starts[0])
    return tuple(range(start, start + int(section["prompt_length"])))


def read_lines(path: str, key: str) -> list[str]:
    """The lines of a UTF-8 file, which may be compressed with gzip; a byte order mark is not text.

    Only a line feed ends a line: JSON may hold other separators as they are.
    """
    opened = gzip.open if path.endswith(".gz") else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline="\n") as file:
            return [line.rstrip("\r\n") for line in file]
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise ConfigError(problem(f"cannot read {path}: {error}", change=key)) from error


def numbered(lines: Sequence[str], limit: int | None) -> Iterator[tuple[int, str]]:
    """The first `limit` lines with their numbers, from 1."""
    return enumerate(lines[:limit], start=1)


def require_items(items: Sequence[object], problems: Problems) -> None:
    """Raise what was found, and that there is nothing."""
    if not items and not problems.messages:
        problems.add("there are no items")
    problems.raise_if_any(ConfigError)
