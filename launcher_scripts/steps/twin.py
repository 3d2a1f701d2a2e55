"""The twin of an export: one prompt through the exported weights, and through another's code.

The exported folder runs in the engine with its reference kernels, the source in the library that
made it, both in float32 on the CPU. What the tensors cannot show is found so: a wrong epsilon, a
wrong base of the rotary positions, a key that nobody read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from launcher_scripts.checkpoint.convert.forecast import weight_bytes
from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.common.errors import CheckpointError, ConfigError, problem
from launcher_scripts.config.settings import ExportSettings
from launcher_scripts.steps.references import (
    RUNNERS,
    EngineModel,
    free_memory,
    missing_packages,
    runner_of,
)

PROMPT_TOKENS = 16
DECODER_TOKENS = 8
# Of the largest logit. Both sides hold the weights rounded to weight_data_type and compute in
# float32, so they differ by the order of sums: some 1e-7 for two layers, more for deep models.
TOLERANCE = 1e-4
# Tables that the export scales or multiplies before it rounds them differ by that rounding: two
# and a half times the half types' 2**-11 and 2**-8. These are the dialects that have such tables.
ROUNDED_TOLERANCES = {"fp32": TOLERANCE, "fp16": 1.25e-3, "bf16": 1e-2}
COMBINING = re.compile("_scaled|_projected")


def compare(folder: Path, settings: ExportSettings) -> dict[str, Any]:
    """Compare the logits of an exported folder with those of its source; what the manifest says.

    That is `skipped` with the reason where there is no reference.
    Raises CheckpointError when they differ by more than `tolerance`.
    """
    checkpoint = FTCheckpoint.open(folder, verify=False)
    source = checkpoint.manifest.source if checkpoint.manifest is not None else {}
    skipped = _unsupported_reason(checkpoint, source, settings)
    if skipped:
        return _said({"skipped": skipped})
    config: Any = checkpoint.config
    ids, decoder_ids = _prompt(config)
    try:
        reference = RUNNERS[str(runner_of(source["format"]))].open(Path(source["path"]))
        reference.round_weights(checkpoint.weight_data_type)
        expected = reference.logits(ids, decoder_ids)
    except ConfigError as error:
        return _said({"skipped": str(error)})
    name = reference.name
    del reference
    try:
        with EngineModel(folder, checkpoint.tp_size, max_tokens=4 * PROMPT_TOKENS) as engine:
            found = engine.logits(ids, decoder_ids)
    except ConfigError as error:
        return _said({"skipped": str(error)})
    largest = float(np.abs(expected).max())
    difference = float(np.abs(found - expected).max())
    limit = tolerance(source["dialects"], checkpoint.weight_data_type) * largest
    if not difference <= limit:  # NaN is a difference too
        raise CheckpointError(
            problem(
                f"the exported model computes other logits than {name}",
                got=f"a difference of {difference:.3g}",
                choices=[f"up to {limit:.3g}, the largest logit being {largest:.3g}"],
            )
        )
    return _said(
        {
            "reference": name,
            "prompt": list(ids),
            "largest_difference": difference,
            "largest_logit": largest,
            "tolerance": limit,
        }
    )


def tolerance(dialects: Iterable[str], weight_data_type: str) -> float:
    """The difference that a good export may have, as a part of the largest logit."""
    combined = any(COMBINING.search(dialect) for dialect in dialects)
    return ROUNDED_TOLERANCES[weight_data_type] if combined else TOLERANCE


def _unsupported_reason(checkpoint: FTCheckpoint, source: Any, settings: ExportSettings) -> str:
    """Why there can be no twin; "" where there can."""
    runner = runner_of(source.get("format"))
    if runner is None or not RUNNERS[runner].rounds:
        return f"no reference computes checkpoints of {source.get('format')}"
    if settings.prompt_checkpoints or settings.ia3_checkpoints or settings.adapter_checkpoints:
        return "the source alone does not have the adapters"
    if getattr(checkpoint.config, "encoder_only", False):
        return "an encoder alone has no logits"
    if missing := missing_packages(runner):
        return f"this Python has no {' and '.join(missing)}"
    needed, free = weight_bytes(checkpoint.config, checkpoint.tp_size, "fp32"), free_memory()
    if needed > free:
        return f"it needs {needed / 1e9:.1f} GB of memory in float32; {free / 1e9:.1f} GB are free"
    return ""


def _prompt(config: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids, the same every time: of the prompt, and of the decoder's if there is one.

    None is the padding token, which M2M-100 in transformers gives no position.
    """
    length = min(PROMPT_TOKENS, getattr(config, "max_positions", None) or PROMPT_TOKENS)
    numbers = np.random.default_rng(0).integers(config.vocab_size, size=(2, PROMPT_TOKENS))
    numbers[numbers == config.pad_id] = config.end_id
    ids = tuple(int(number) for number in numbers[0, :length])
    if not hasattr(config, "num_decoder_layers"):
        return ids, ()
    rest = (int(number) for number in numbers[1, : min(DECODER_TOKENS, length) - 1])
    return ids, (config.start_id, *rest)


def _said(result: dict[str, Any]) -> dict[str, Any]:
    """Tell the user what the manifest gets."""
    if "skipped" in result:
        print(f"note: no twin was compared: {result['skipped']}", flush=True)
    else:
        print(
            f"the logits differ by {result['largest_difference']:.3g} at most from "
            f"{result['reference']} (tolerance {result['tolerance']:.3g})",
            flush=True,
        )
    return result
