"""The twin of an export: its logits of one prompt and its ids of texts, beside another's code's.

The exported folder runs in the engine with its reference kernels, the source in the library that
made it, both in float32 on the CPU. What the tensors cannot show is found so: a wrong epsilon, a
wrong base of the rotary positions, a key that nobody read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from launcher_scripts.checkpoint.export import open_source
from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.checkpoint.fastertransformer.manifest import read_manifest
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.model_repository import encoding_parameters
from launcher_scripts.checkpoint.verification import weight_bytes
from launcher_scripts.common.errors import CheckpointError, ConfigError, problem
from launcher_scripts.common.tokenizer import SpecialIds, Tokenizer, load_tokenizer
from launcher_scripts.config.settings import AUTO, ExportSettings
from launcher_scripts.evaluation.tasks.task import NoReferenceError, TorchReference
from launcher_scripts.evaluation.tasks.transformers_model import TransformersText
from launcher_scripts.evaluation.twin.diagnosis import CONVERSATIONS, PROBES, Render
from launcher_scripts.steps.references import (
    ENGINE,
    PROMPT_TOKENS,
    RUNNERS,
    EngineModel,
    chat_render,
    free_memory,
    missing_runner_packages,
    opened_reference,
    prompt_ids,
    runner_of,
    tolerance,
)

_ADAPTERS = ("prompt_checkpoints", "ia3_checkpoints", "adapter_checkpoints")
# Options of an export that say what is read.
_READING = (
    *("source", "num_attention_heads", "encoder_only", "ia3_checkpoints", "ia3_in_place"),
    *("adapter_checkpoints", "training_checkpoint", "allow_nonfinite", "allow_custom_code_config"),
)


def compare_shards(folder: Path, settings: ExportSettings) -> dict[str, Any]:
    """Compare the logits of an exported folder with those of its source; what the manifest says.

    That is `skipped` with the reason where there is no reference. The ids of texts are compared
    where transformers reads them (`texts`).
    Raises CheckpointError when logits differ by more than `tolerance`, when ids differ, and when
    the reference refuses the checkpoint.
    """
    checkpoint = FTCheckpoint.open(folder, verify=False)
    source = checkpoint.manifest.source if checkpoint.manifest is not None else {}
    try:
        texts = _compare_texts(checkpoint, source, settings)
        return _described(texts | _compare_logits(folder, checkpoint, source, settings))
    except NoReferenceError as error:
        return _described({"skipped": str(error)})
    except ConfigError as error:
        raise CheckpointError(f"the reference refuses the checkpoint: {error}") from error


def _compare_texts(checkpoint: FTCheckpoint, source: Any, settings: ExportSettings) -> Any:
    """Compare the ids of texts, and the texts of ids, with transformers'; {} where it reads none.

    Returns `texts`, their number.
    """
    runner = runner_of(source.get("format"))
    is_auto = settings.tokenizer.source == "auto"
    if runner != "transformers" or not is_auto or missing_runner_packages(runner):
        return {}
    reference = TransformersText(Path(source["path"]))
    tokenizer = load_tokenizer(checkpoint.folder)
    parameters = {name: str(value) for name, value in encoding_parameters(checkpoint).items()}
    special = SpecialIds.of(parameters)
    texts = [*PROBES, *(f"a {token} b{token}c" for token in reference.added_tokens())]
    texts += _chats(checkpoint.folder, tokenizer, reference)
    different = []
    for text in texts:
        ids, expected = tokenizer.encode(text), reference.encode(text, with_special=False)
        pairs = [(ids, expected), (special.surround(ids), reference.encode(text))]
        pairs.append((tokenizer.decode(expected), reference.decode(expected)))  # type: ignore[arg-type]
        different += [(text, *pair) for pair in pairs if pair[0] != pair[1]][:1]
    if different:
        text, exported, expected = different[0]
        raise CheckpointError(
            problem(
                f"the exported tokenizer reads {len(different)} of {len(texts)} texts otherwise "
                f"than transformers, first {text!r}",
                got=exported,
                choices=[expected],
                change="export.model.tokenizer",
            )
        )
    return {"texts": len(texts)}


def _chats(folder: Path, tokenizer: Tokenizer, reference: TransformersText) -> list[str]:
    """The conversations as both templates write them; CheckpointError where these differ."""
    template = chat_render(folder, tokenizer)
    if template is None or not reference.has_chat_template:
        return []
    written = [
        (_written(template, messages), _written(reference.render, messages))
        for messages in CONVERSATIONS
    ]
    for exported, expected in written:
        if exported != expected:
            message = "the exported chat template writes another text than transformers"
            raise CheckpointError(problem(message, got=exported, choices=[expected]))
    return [text for text, _ in written if text is not None]


def _written(render: Render, messages: Sequence[Mapping[str, str]]) -> str | None:
    """The conversation as text; None if the template refuses it."""
    try:
        return render(messages)
    except ValueError:
        return None


def _compare_logits(
    folder: Path, checkpoint: FTCheckpoint, source: Any, settings: ExportSettings
) -> dict[str, Any]:
    skipped = _unsupported_reason(checkpoint, source, settings)
    if skipped:
        return {"skipped": skipped}
    config: Any = checkpoint.config
    ids, decoder_ids = prompt_ids(config)
    reference = RUNNERS[str(runner_of(source["format"]))].open(Path(source["path"]))
    reference.round_weights(checkpoint.weight_data_type)
    expected = reference.logits(ids, decoder_ids)
    name = reference.name
    del reference
    with EngineModel(folder, checkpoint.tp_size, max_tokens=4 * PROMPT_TOKENS) as engine:
        logits = engine.logits(ids, decoder_ids)
    part = tolerance(source["dialects"], checkpoint.weight_data_type)
    return _checked(logits, expected, name, part) | {"prompt": list(ids)}


def compare_transformers(folder: Path, settings: ExportSettings) -> dict[str, Any]:
    """Compare the logits that transformers computes of a written folder with its source's.

    The source is computed by its maker's code where that is installed and no adapter is merged,
    else by the engine. Returns and raises as `compare` does.
    """
    try:
        return _described(_compare_written(folder, settings))
    except NoReferenceError as error:
        return _described({"skipped": str(error)})
    except ConfigError as error:
        message = f"transformers or the reference refuses the checkpoint: {error}"
        raise CheckpointError(message) from error


def _compare_written(folder: Path, settings: ExportSettings) -> dict[str, Any]:
    manifest = read_manifest(folder)
    source: Mapping[str, Any] = {} if manifest is None else manifest.source
    written = open_source(Archive(folder), "huggingface")
    config: Any = written.config
    if missing := missing_runner_packages("transformers"):
        return {"skipped": f"this Python has no {' and '.join(missing)}"}
    if skipped := _unfit_reason(config, weight_bytes(config, 1, "fp32")):
        return {"skipped": skipped}
    ids, decoder_ids = prompt_ids(config)
    logits = RUNNERS["transformers"].open(folder).logits(ids, decoder_ids)
    data_type = settings.weight_data_type
    maker = runner_of(source.get("format"))
    alone = not any(getattr(settings, name) for name in _ADAPTERS)
    native = (
        maker is not None and RUNNERS[maker].rounds and not missing_runner_packages(maker) and alone
    )
    runner = maker if native and maker is not None else ENGINE
    path = Path(str(source["path"]) if native else settings.checkpoint_path)
    options = {name: getattr(settings, name) for name in _READING}
    if data_type != AUTO:
        options["weight_data_type"] = data_type
    with opened_reference(path, runner, 4 * PROMPT_TOKENS, options) as reference:
        if data_type != AUTO and isinstance(reference, TorchReference):
            reference.round_weights(data_type)
        expected = reference.logits(ids, decoder_ids)[..., : logits.shape[-1]]
        name = reference.name
    dialects = [*source.get("dialects", ()), *written.describe()["dialects"]]
    part = tolerance(dialects, "fp32" if data_type == AUTO else data_type)
    return _checked(logits, expected, name, part) | {"prompt": list(ids)}


def _checked(logits: Any, expected: Any, name: str, part: float) -> dict[str, Any]:
    """Return the difference of logits. Raises CheckpointError beyond the tolerance.

    part: of the largest logit, which a good export may differ by
    """
    scale = float(np.abs(expected).max())
    difference = float(np.abs(logits - expected).max())
    limit = part * scale
    if not difference <= limit:  # NaN is a difference too
        raise CheckpointError(
            problem(
                f"the exported model computes other logits than {name}",
                got=f"a difference of {difference:.3g}",
                choices=[f"up to {limit:.3g}, the largest logit being {scale:.3g}"],
            )
        )
    return {
        "reference": name,
        "largest_difference": difference,
        "largest_logit": scale,
        "tolerance": limit,
    }


def _unsupported_reason(checkpoint: FTCheckpoint, source: Any, settings: ExportSettings) -> str:
    """Why there can be no twin; "" where there can."""
    runner = runner_of(source.get("format"))
    if runner is None or not RUNNERS[runner].rounds:
        return f"no reference computes checkpoints of {source.get('format')}"
    if any(getattr(settings, name) for name in _ADAPTERS):
        return "the source alone does not have the adapters"
    if "agm" in source.get("dialects", ()):
        return "transformers has no code for an Agm"
    if missing := missing_runner_packages(runner):
        return f"this Python has no {' and '.join(missing)}"
    needed = weight_bytes(checkpoint.config, checkpoint.tp_size, "fp32")
    return _unfit_reason(checkpoint.config, needed)


def _unfit_reason(config: Any, needed: int) -> str:
    """Return why a model's logits cannot be computed here, "" if they can.  needed: bytes"""
    if getattr(config, "encoder_only", False):
        return "an encoder alone has no logits"
    free = free_memory()
    if needed > free:
        return f"it needs {needed / 1e9:.1f} GB of memory in float32; {free / 1e9:.1f} GB are free"
    return ""


def _described(result: dict[str, Any]) -> dict[str, Any]:
    """Tell the user what the manifest gets."""
    if "texts" in result:
        print(f"{result['texts']} texts have the ids of transformers", flush=True)
    if "skipped" in result:
        print(f"note: no twin was compared: {result['skipped']}", flush=True)
    else:
        print(
            f"the logits differ by {result['largest_difference']:.3g} at most from "
            f"{result['reference']} (tolerance {result['tolerance']:.3g})",
            flush=True,
        )
    return result
