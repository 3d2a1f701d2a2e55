"""From a source checkpoint to a transformers folder: check, plan, then write."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from launcher_scripts.checkpoint.export import (
    IDENTITY,
    Compare,
    OpenedExport,
    check_space,
    export_identity,
    open_export,
    print_forecast,
    reused,
    source_digests,
)
from launcher_scripts.checkpoint.fastertransformer.manifest import reject_existing
from launcher_scripts.checkpoint.huggingface.config_json import (
    candidates,
    config_with_token_ids,
    proposal,
    reading,
    refuse_unwritten,
    transformers_class,
)
from launcher_scripts.checkpoint.huggingface.folder import (
    HuggingFaceWriter,
    json_bytes,
    make_shards,
    tensor_dtype,
    verify_shards,
    write_shards,
)
from launcher_scripts.checkpoint.huggingface.lora import peft_files, without_lora
from launcher_scripts.checkpoint.huggingface.tensors import (
    TargetTensor,
    centered,
    name_prefix,
    of_all_layers,
    restacked,
    target_tensors,
    transformers_name,
    without_padding,
)
from launcher_scripts.checkpoint.layout.tasks import Task
from launcher_scripts.checkpoint.layout.writing import Progress
from launcher_scripts.checkpoint.sources.huggingface_architectures import ARCHITECTURES, HEAD
from launcher_scripts.checkpoint.sources.huggingface_stacked_experts import IN_MEMORY_TYPES
from launcher_scripts.checkpoint.tokenizers.text_probe import (
    TEXTS,
    loaded_tokenizer,
    probed_tokenizer,
    unified_files,
)
from launcher_scripts.checkpoint.tokenizers.tokenizer_classes import SPACE
from launcher_scripts.common.errors import CheckpointError, Problems, problem
from launcher_scripts.common.files import parse_json
from launcher_scripts.common.tokenizer import GENERATION_FILE, OPTIONAL_FILES
from launcher_scripts.config.export import TokenizerSettings
from launcher_scripts.config.settings import AUTO, ExportSettings
from launcher_scripts.models.gpt_dialects import DIALECTS

FAST_FILE = "tokenizer.json"
TOKENIZER_CONFIG = OPTIONAL_FILES[1]
# What transformers reads of a folder besides config.json and weights.
_PATTERNS = (
    *("tokenizer*.json", "*.model", "vocab.*", "merges.txt", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.*", "additional_chat_templates/*.jinja", "*.spm"),
    *("generation_config.json", "sentencepiece*", "spiece*"),
)
# Texts whose ids must stay: beside those of a probe, spaces around lines.
_CHECKED = (*TEXTS, " two  spaces \n\n x \n", "\ta  b\t ")
_GENERAL_CLASS = "PreTrainedTokenizerFast"
# A tokenizer's main file -> the class of transformers that reads it.
_CLASSES = {"tokenizer.model": _GENERAL_CLASS, "merges.txt": "GPT2Tokenizer"}
# Steps of SentencePiece that its models may leave out: spaces in a row and around a text become
# one and none, and a space is put before it.
_PREFIX = {"type": "Prepend", "prepend": SPACE}
_SPACES = (
    {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
    {"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""},
)
_NORMALIZERS: tuple[tuple[Mapping[str, Any], ...], ...] = (
    (*_SPACES, _PREFIX),
    (_PREFIX,),
    _SPACES,
)
# Of config.json, by its own types.
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_MAX_LISTED = 3
# Differences of a model type that the hyperparameters say nothing about.
_UNKNOWN = 99


@dataclass(frozen=True)
class TransformersContent:
    """What is going to be written: config.json and tensors by their names in transformers."""

    config: dict[str, Any]
    tensors: list[TargetTensor]


def export_huggingface(settings: ExportSettings, reference: Compare | None = None) -> Path:
    """Write settings.huggingface.folder; returns it.

    reference: called with the verified folder where settings.verify asks for it
    Raises CheckpointError or ConfigError; what is left then is as of an export of shards.
    """
    target, options = settings.checkpoint_dir, settings.huggingface
    reject_existing(target, settings.overwrite or settings.reuse)
    complete = open_export(settings)
    tasks, config = without_lora(complete.tasks, complete.config)
    opened = replace(complete, tasks=tasks, config=config)
    stated, local = settings, settings.weight_data_type == AUTO
    if local:
        settings = replace(settings, weight_data_type=opened.stored)
    model = transformers_model(opened, options.vocab_size)
    model.config["dtype"] = _DTYPES[settings.weight_data_type]
    model.config["torch_dtype"] = model.config["dtype"]
    typed = [
        (tensor, tensor_dtype(tensor, settings.weight_data_type, local=local))
        for tensor in model.tensors
    ]
    shards = make_shards(typed, options.max_shard_bytes)
    files = folder_files(opened, model.config)
    files |= peft_files(complete.tasks, complete.config, model.tensors, str(target))
    source = opened.checkpoint.describe()
    metadata = {**source, "huggingface": asdict(replace(options, folder=None)), "own_types": local}
    name = export_identity(settings, metadata, complete.config, opened.path)
    if settings.reuse and not settings.overwrite and target.exists():
        verify = partial(verify_shards, target, shards, settings)
        return reused(settings, name, files, opened.path, verify)
    total = sum(shard.nbytes for shard in shards)
    check_space(target, total)
    print_forecast(opened, total, target)
    metadata = source | {IDENTITY: name} | ({"notes": opened.notes} if opened.notes else {})
    writer = HuggingFaceWriter(
        target,
        model.config,
        shards,
        settings.weight_data_type,
        source=metadata,
        overwrite=settings.overwrite,
        name=name,
    )
    with source_digests(settings, opened.path) as digests, writer:
        for file_name, content in files.items():
            writer.copy(content, file_name)
        progress = Progress(f"exporting {opened.path.name}", total)
        unfit = write_shards(writer, opened.archive, settings, progress)
        progress.close()
        problems = Problems(f"the weights of {opened.path}")
        problems.add_first(sorted({str(error) for error in unfit}), 20)
        problems.raise_if_any(CheckpointError)
        writer.source |= digests()
        writer.seal()
        if settings.verify:
            verify_shards(writer.partial, shards, settings)
            print(f"verified {len(model.tensors)} tensors against {opened.path}", flush=True)
            if reference is not None:
                writer.annotate("twin", reference(writer.partial, stated))
    return target


def exported_model(folder: Path) -> TransformersContent:
    """Return the model of exported shards. Raises CheckpointError where there is no class."""
    settings = ExportSettings(
        model_name=folder.name,
        checkpoint_path=str(folder),
        triton_model_dir=str(folder),
        tokenizer=TokenizerSettings("none"),
        model_type="",
    )
    opened = open_export(settings)
    tasks, config = without_lora(opened.tasks, opened.config)
    return transformers_model(replace(opened, tasks=tasks, config=config))


def transformers_model(opened: OpenedExport, vocab_size: int | None = None) -> TransformersContent:
    """The first model type of transformers that computes what the checkpoint does.

    Raises CheckpointError with what the nearest ones cannot say.
    """
    values = opened.checkpoint.config_json()
    refuse_unwritten(opened.config, values)
    forms = [(opened.tasks, opened.config)]
    if (as_stored := centered(*forms[0])) is not None:
        forms.insert(0, as_stored)
    rows = vocab_size or _rows(opened, values)
    if rows > opened.config.vocab_size:
        raise CheckpointError(
            problem(
                "the model has fewer rows of the vocabulary",
                got=rows,
                choices=[f"at most {opened.config.vocab_size}"],
                change="export.huggingface.vocab_size",
            )
        )
    if rows < opened.config.vocab_size:
        forms = [without_padding(*form, rows) for form in forms]
    rejected: dict[str, list[str]] = {}
    for tasks, config in forms:
        for model_type, raw in candidates(config, values):
            reasons: list[str] = []
            model = _model(
                model_type, raw, tasks, config, reasons, opened.checkpoint.config_dialects
            )
            if model is not None:
                return model
            if model_type not in rejected or len(reasons) < len(rejected[model_type]):
                rejected[model_type] = reasons
    nearest = sorted(rejected, key=lambda name: len(rejected[name]))[:_MAX_LISTED]
    reasons_of = {name: list(dict.fromkeys(rejected[name]))[:_MAX_LISTED] for name in nearest}
    listed = "; ".join(f"{name}: {', '.join(reasons_of[name])}" for name in nearest)
    message = f"transformers has no class of the model in {opened.path}; the nearest are {listed}"
    raise CheckpointError(problem(message, change="export.format=fastertransformer"))


def _rows(opened: OpenedExport, raw: Mapping[str, Any] | None) -> int:
    """Rows of the vocabulary without those that a training has added as padding."""
    rows: int = opened.config.vocab_size
    if raw is not None or not opened.files:
        return rows
    return min(loaded_tokenizer(opened.files).vocab_size or rows, rows)


def _model(
    model_type: str,
    values: Mapping[str, Any] | None,
    tasks: Sequence[Task],
    config: Any,
    reasons: list[str],
    dialects: Sequence[str],
) -> TransformersContent | None:
    """The model as this type; None if it is none, and why.

    values:   its config.json
    dialects: of the model that this config.json describes
    """
    architecture = transformers_class(model_type, config)
    first: list[str] = []
    for names in _dialects(model_type, dialects if values is not None else None):
        result: list[str] = []
        tensors = target_tensors(tasks, names, result)
        keys = tensors.keys()
        raw = dict(values) if values is not None else proposal(model_type, config, keys)
        if raw is None:
            first = first or ["its config.json cannot be told"] * _UNKNOWN
            continue
        raw |= {"vocab_size": config.vocab_size, "tie_word_embeddings": HEAD not in keys}
        tensors = of_all_layers(tensors, raw, result)
        read = reading(raw, keys, config)
        if not result and not read.differences and tuple(dict.fromkeys(read.dialects)) == names:
            raw = config_with_token_ids(raw, read.config, config) | {
                "architectures": [architecture]
            }
            raw.pop("quantization_config", None)
            return TransformersContent(raw, _named(tensors, model_type))
        first = first or [*read.differences, *result] or ["its tensors have other names"]
    reasons += first
    return None


def _dialects(model_type: str, stored: Sequence[str] | None) -> Iterator[tuple[str, ...]]:
    """Dialects that tensors of a model type may have.

    stored: those that the model has for sure, perhaps as transformers 5 names it in memory
    """
    row = ARCHITECTURES[model_type]
    first = (f"{row.dialect}_in_memory",) if model_type in IN_MEMORY_TYPES else ()
    if stored is not None:
        others = [name for name in stored if not name.endswith("_in_memory")]
        yield tuple(dict.fromkeys((*first, *others)))
        return
    base = tuple(dict.fromkeys((*first, row.dialect, *row.inherits)))
    yield base
    for variant in sorted(_variants(model_type)):
        if not variant.endswith("_in_memory"):
            yield (variant, *base)


def _variants(model_type: str) -> set[str]:
    row = ARCHITECTURES[model_type]
    return {name for name in DIALECTS if name.startswith(f"{row.dialect}_")}


def _named(tensors: Mapping[str, TargetTensor], model_type: str) -> list[TargetTensor]:
    """The tensors under their names in transformers, as its files have them."""
    prefix = name_prefix(model_type)
    result = []
    for name, tensor in restacked(tensors, model_type).items():
        names = ARCHITECTURES[model_type].tied.get(HEAD, ())
        saved = names[0] if name == HEAD and names else name
        result.append(replace(tensor, name=transformers_name(saved, prefix)))
    return result


def folder_files(opened: OpenedExport, config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return name -> content of the files beside the weights.

    config: config.json
    A folder of transformers keeps its own files as they are.
    """
    files = dict(opened.files)
    if files and opened.base.format == "huggingface":
        archive = opened.archive
        names = [name for name in archive.names() if _is_of_tokenizer(name)]
        files = {name: archive.read(name) for name in names} or files
    elif files and FAST_FILE not in files:
        files = _with_fast_file(files)
    files[GENERATION_FILE] = _generation(files.get(GENERATION_FILE), config)
    return files


def _is_of_tokenizer(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in _PATTERNS)


def _with_fast_file(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """One tokenizer.json in place of pieces or of vocabulary and merges, with the same ids."""
    options = parse_json(files.get(TOKENIZER_CONFIG, b"{}"))
    if "tokenizer_class" in options or not {*_CLASSES} & {*files}:
        return dict(files)
    name = next(name for main, name in _CLASSES.items() if main in files)
    result = unified_files(
        {**files, TOKENIZER_CONFIG: json_bytes({**options, "tokenizer_class": name})}, {}
    )
    before = loaded_tokenizer(files)
    expected = [before.encode(text) for text in _CHECKED]
    for normalizers in [(), *_NORMALIZERS] if name == _GENERAL_CLASS else [()]:
        changed = {**result, FAST_FILE: _normalized(result[FAST_FILE], normalizers)}
        after = probed_tokenizer(changed)
        if [after.encode(text) for text in _CHECKED] == expected:
            return changed
    raise CheckpointError(
        problem(
            "the tokenizer cannot be written as tokenizer.json with the same ids",
            got=sorted(files),
            change="export.model.tokenizer=none, or its files of transformers",
        )
    )


def _normalized(content: bytes, normalizers: Sequence[Mapping[str, Any]]) -> bytes:
    """tokenizer.json of pieces with further steps before its spaces are replaced."""
    if not normalizers:
        return content
    tokenizer = json.loads(content)
    steps = tokenizer["normalizer"]["normalizers"]
    tokenizer["normalizer"]["normalizers"] = [*steps[:-1], *normalizers, steps[-1]]
    if _PREFIX in normalizers:
        strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        tokenizer["decoder"]["decoders"].append(strip)
    return json.dumps(tokenizer, ensure_ascii=False).encode()


def _generation(content: bytes | None, config: Mapping[str, Any]) -> bytes:
    """generation_config.json: the checkpoint's own, or the special ids of config.json."""
    if content is not None and json.loads(content):
        return content
    names = ("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id")
    values = {name: config[name] for name in names if config.get(name) is not None}
    return json_bytes({"_from_model_config": True, **values})
