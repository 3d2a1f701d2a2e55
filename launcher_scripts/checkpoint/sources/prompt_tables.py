"""Prompt tables of NeMo's prompt learning: one [virtual tokens, hidden] per task.

NeMo fills the table when training ends. What it did not fill is computed here from the prompt
encoder where that is a pair of linear layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from launcher_scripts.checkpoint.formats.dtypes import float32, widened
from launcher_scripts.checkpoint.formats.source_tensor import SourceTensor, concatenated
from launcher_scripts.checkpoint.sources.nemo_parts import PartFile
from launcher_scripts.common.errors import CheckpointError, Problems, problem

_TABLE = re.compile(r"(?:prompt_table\.)+(?P<task>.+)\.prompt_embeddings\.weight")
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
# The encoder's tensors by their last names; what leads to them differs between releases.
_ENCODER = re.compile(
    r"(?:prompt_encoder\.)?(?:embeddings?|mlp_head|lstm_head|tpmlp|ptuning_adapter)\b.*"
)
_CLASSIC = ("mlp_head.0", "mlp_head.2")
_PARALLEL = re.compile(r"(?P<stem>(?:.+\.)?)first\.weight")


def read_tables(part: PartFile, number: int) -> dict[str, SourceTensor]:
    """Task -> its table, in the order of the checkpoint's task templates.

    number: how many tasks come before, for those without a name
    Raises CheckpointError for what is not filled and cannot be computed, and for unknown tensors.
    """
    problems = Problems(f"the prompts {part.path}")
    tables: dict[str, SourceTensor] = {}
    for name, shards in part.others.items():
        match = _TABLE.fullmatch(name)
        if match:
            tables[match["task"]] = shards[0]
        elif not _ENCODER.fullmatch(name):
            problems.add(f"{name} is not a part of prompt learning")
    if any("ptuning_adapter." in name for name in part.others):
        _compute(part, f"task_{number}", tables, problems)
    templates = _templates(part.raw)
    empty = [
        task for task in templates if task not in tables or not widened(tables[task].read()).any()
    ]
    if len(empty) == 1 and empty[0] in _new_tasks(part.raw, empty):
        _compute(part, empty[0], tables, problems)
    elif empty:
        problems.add(
            "no prompt table is filled for these tasks; let NeMo finish their training, which "
            "fills it",
            got=empty,
        )
    _check(tables, templates, problems)
    problems.raise_if_any(CheckpointError)
    return {task: tables[task] for task in dict.fromkeys([*templates, *tables])}


def _new_tasks(raw: Mapping[str, Any], default: list[str]) -> list[Any]:
    found = raw.get("new_tasks")
    return found if isinstance(found, list) and found else default


def _templates(raw: Mapping[str, Any]) -> dict[str, int]:
    """Task -> its virtual tokens, as the configuration has them."""
    found = raw.get("task_templates") or ()
    try:
        return {
            str(template["taskname"]): int(template["total_virtual_tokens"])
            for template in found
            if template.get("total_virtual_tokens")
        }
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise CheckpointError(
            problem("task_templates of the prompts are damaged", got=found)
        ) from error


def _check(
    tables: Mapping[str, SourceTensor], templates: Mapping[str, int], problems: Problems
) -> None:
    for task, table in tables.items():
        if not _NAME.fullmatch(task):
            problems.add("a task's name cannot be part of a file's name", got=task)
        if task in templates and table.shape[:1] != (templates[task],):
            problems.add(
                f"the table of {task} has another length than its template says",
                got=table.shape[0] if table.shape else 0,
                choices=[templates[task]],
            )


def _compute(
    part: PartFile, task: str, tables: dict[str, SourceTensor], problems: Problems
) -> None:
    """Add the encoder's output as the table of `task`, in float32."""
    try:
        values = _encoded(part)
    except (KeyError, ValueError, CheckpointError) as error:
        problems.add(f"the prompt encoder is damaged: {error}")
        return
    if values is None:
        problems.add(
            f"the prompt table of {task} is not filled and cannot be computed from this encoder; "
            "let NeMo finish the training, which fills it",
            got=sorted(part.others)[:3],
            choices=["a filled prompt_table", "an mlp or tpmlp encoder"],
        )
        return
    tables[task] = SourceTensor.whole(np.ascontiguousarray(values, np.float32))


def _encoded(part: PartFile) -> Any:
    """[virtual tokens, hidden]; None for an encoder that is not a pair of linear layers."""
    found = part.others
    parallel = next(filter(None, map(_PARALLEL.fullmatch, found)), None)
    embeddings = next(
        (
            shards[0]
            for name, shards in found.items()
            if re.search(r"embeddings?\.weight$", name) and not _TABLE.fullmatch(name)
        ),
        None,
    )
    recurrent = any("lstm_head" in name for name in found)
    if embeddings is None or recurrent or not (parallel or f"{_CLASSIC[0]}.weight" in found):
        return None
    values = float32(embeddings.read())
    if parallel:
        # Ranks share the inner axis.
        first, second = f"{parallel['stem']}first", f"{parallel['stem']}second"
        weight, bias = _joined(found, f"{first}.weight"), _joined(found, f"{first}.bias")
        inner = _gelu(_linear(values, weight, bias))
        second_weight = _joined(found, f"{second}.weight", axis=1)
        return _linear(inner, second_weight, _whole(found, f"{second}.bias"))
    first, second = _CLASSIC
    inner = _linear(values, *(_whole(found, f"{first}.{kind}") for kind in ("weight", "bias")))
    weight, bias = (_whole(found, f"{second}.{kind}") for kind in ("weight", "bias"))
    return _linear(np.maximum(inner, 0), weight, bias)


def _linear(values: Any, weight: Any, bias: Any) -> Any:
    """values @ weight.T + bias. Raises ValueError for a bias that is not one number per output."""
    if bias.shape != weight.shape[:1]:
        raise ValueError(f"a bias of shape {bias.shape} for a weight of shape {weight.shape}")
    return values @ weight.T + bias


def _whole(found: Mapping[str, tuple[SourceTensor, ...]], name: str) -> Any:
    """A tensor that every rank holds."""
    return float32(found[name][0].read())


def _joined(found: Mapping[str, tuple[SourceTensor, ...]], name: str, axis: int = 0) -> Any:
    """A tensor that the ranks share."""
    return float32(concatenated(found[name], axis).read())


def _gelu(x: Any) -> Any:
    """The tanh form, which NeMo's fused kernel computes."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
