"""LoRA adapters beside a transformers folder: each as PEFT stores it, in adapters/<name>.

A layout of the weight table moves outputs of a projection, and B has the projection's outputs: so
the inverse of the layout is that of B.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.formats.source_tensor import float32
from launcher_scripts.checkpoint.huggingface.folder import json_bytes, safetensors_header
from launcher_scripts.checkpoint.huggingface.tensors import TargetTensor, TensorPart, matrix_of
from launcher_scripts.checkpoint.layout.layouts import LAYOUTS
from launcher_scripts.checkpoint.layout.tasks import Task
from launcher_scripts.common.errors import CheckpointError, Problems
from launcher_scripts.models.adapters import LORA_TARGETS
from launcher_scripts.models.family import Partition

FOLDER = "adapters"
_STEM = "base_model.model."
_SIDES = (".lora_in.weight", ".lora_out.weight")
_WEIGHT = ".weight"
_MERGED = "export.model.adapter_checkpoints, which merges it"
Floats = NDArray[np.float32]
# A [rank, in] and B [out, rank], times its scale.
Pair = tuple[Floats, Floats]


def without_lora(tasks: Sequence[Task], config: Any) -> tuple[list[Task], Any]:
    """The tasks and the hyperparameters of the model without the adapters beside it."""
    if not _names(config):
        return list(tasks), config
    others = [task for task in tasks if not task.spec.name.endswith(_SIDES)]
    parts = replace(config.parts, lora_names=(), lora_rank=0, lora_targets=())
    return others, replace(config, parts=parts)


def _names(config: Any) -> tuple[str, ...]:
    return tuple(getattr(getattr(config, "parts", None), "lora_names", ()))


@dataclass(frozen=True)
class _Projection:
    """A and B of all adapters for one projection of a layer, as the weight table has them.

    downs: [in, adapters, blocks, rank];  ups: [adapters, rank, out]
    """

    downs: Floats
    ups: Floats
    sizes: tuple[int, ...]

    def pair(self, adapter: int, part: TensorPart) -> Pair:
        """A and B of the rows that `part` has, without ranks that are zero."""
        ends = np.cumsum(self.sizes)[:-1]
        ups = np.split(self.ups[adapter], ends, axis=-1)
        pairs: list[Pair] = []
        for block in range(len(ups)):
            blocks = [[up if n == block else np.zeros_like(up)] for n, up in enumerate(ups)]
            up = float32(matrix_of(part.inverse(blocks)[part.index]))
            up = up.T if part.layout is LAYOUTS["as_is"] else up
            if up.any():
                pairs.append((self.downs[:, adapter, block].T, up))
        if not pairs:
            return self.downs[:, adapter, 0].T[:0], np.zeros((1, 0), np.float32)
        down, up = pairs[0]
        if all(np.array_equal(down, other) for other, _ in pairs):
            up = sum((more for _, more in pairs[1:]), up)
        else:
            down, up = (
                np.concatenate(sides, axis) for axis, sides in enumerate(zip(*pairs, strict=True))
            )
        used = down.any(1) & up.any(0)
        return down[used], up[:, used]


def peft_files(
    tasks: Sequence[Task], config: Any, tensors: Sequence[TargetTensor], base: str
) -> dict[str, bytes]:
    """Return name -> content of the files of every adapter beside the model.

    tasks, config: of the export, with its adapters
    tensors:       the model's, as they are written
    base:          the folder of the model
    Raises CheckpointError with every projection that PEFT has no module for.
    """
    names = _names(config)
    projections = _projections(tasks, config)
    modules = list(_modules(tensors, projections)) if names else []
    result: dict[str, bytes] = {}
    for number, name in enumerate(names):
        pairs = {
            module: pair
            for module, part, projection in modules
            if (pair := projection.pair(number, part))[0].size
        }
        is_input_first = any(part.layout is LAYOUTS["as_is"] for _, part, _ in modules)
        folder = f"{FOLDER}/{name}"
        content = json_bytes(_config(pairs, base, fan_in_fan_out=is_input_first))
        result[f"{folder}/adapter_config.json"] = content
        result[f"{folder}/adapter_model.safetensors"] = _safetensors(pairs)
    return result


def _projections(tasks: Sequence[Task], config: Any) -> dict[tuple[str, int | None], _Projection]:
    """(stem, layer) -> what the adapters have for it."""
    by_name = {task.name: task for task in tasks if task.spec.name.endswith(_SIDES)}
    result = {}
    for name, task in by_name.items():
        if not name.endswith(_SIDES[0]):
            continue
        stem = task.spec.name.removeprefix("layers.*.").removesuffix(_SIDES[0])
        down, up = _values(task), _values(by_name[name.removesuffix(_SIDES[0]) + _SIDES[1]])
        blocks = LORA_TARGETS[stem].blocks
        sizes = tuple(getattr(task.config, block) for block in blocks) or (up.shape[1],)
        count, rank = len(_names(config)), config.parts.lora_rank
        downs = down.reshape(len(down), count, len(sizes), rank)
        result[stem, task.layer] = _Projection(downs, up.reshape(count, rank, -1), sizes)
    return result


def _values(task: Task) -> Floats:
    units = [float32(unit) for block in task.blocks() for unit in block]
    values: Floats = np.concatenate(units, axis=-1)
    return values


def _modules(
    tensors: Sequence[TargetTensor], projections: Mapping[tuple[str, int | None], _Projection]
) -> Iterator[tuple[str, TensorPart, _Projection]]:
    """Iterate over the modules with LoRA, by their names in transformers."""
    problems = Problems("the LoRA adapters as PEFT")
    missing = set(projections)
    for tensor in tensors:
        keys = {_key(part.task) for part in tensor.parts} & projections.keys()
        if not keys or not tensor.name.endswith(_WEIGHT):
            continue
        missing -= keys
        part = tensor.parts[0]
        moves_inputs = part.task.spec.partition is Partition.ROW_PARALLEL and part.layout not in (
            LAYOUTS["transposed"],
            LAYOUTS["as_is"],
        )
        if (
            len(tensor.parts) > 1
            or len(tensor.shape) != 2
            or moves_inputs
            or not part.layout.inverse
        ):
            problems.add(f"LoRA of {tensor.name} has no place", change=_MERGED)
            continue
        yield tensor.name.removesuffix(_WEIGHT), part, projections[_key(part.task)]
    for stem, layer in sorted(missing, key=str):
        problems.add(f"LoRA of {stem} of layer {layer} has no place", change=_MERGED)
    problems.raise_if_any(CheckpointError)


def _key(task: Task) -> tuple[str, int | None]:
    return task.spec.name.removeprefix("layers.*.").removesuffix(_WEIGHT), task.layer


def _config(pairs: Mapping[str, Pair], base: str, *, fan_in_fan_out: bool) -> dict[str, Any]:
    """adapter_config.json: the scale is in B, so that lora_alpha is the rank."""
    ranks = {module: len(down) for module, (down, _) in pairs.items()}
    rank = max(ranks.values(), default=1)
    others = {module: number for module, number in ranks.items() if number != rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": others,
        "alpha_pattern": others,
        "target_modules": sorted(ranks),
        "fan_in_fan_out": fan_in_fan_out,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def _safetensors(pairs: Mapping[str, Pair]) -> bytes:
    arrays = {
        f"{_STEM}{module}.lora_{side}.weight": np.ascontiguousarray(values, "<f4")
        for module, pair in pairs.items()
        for side, values in zip("AB", pair, strict=True)
    }
    header = safetensors_header((name, a.shape, a.dtype) for name, a in arrays.items())
    return header + b"".join(values.tobytes() for values in arrays.values())
