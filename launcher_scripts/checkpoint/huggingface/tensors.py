"""The tensors of a transformers model, made of the tasks of an export.

The weight table says for every dialect which source tensors make up a row. Read backwards it says
of which rows a source tensor is made: their layouts have inverses. A source tensor that is laid
out as the model type has it is taken as it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.formats.source_tensor import (
    FLOATS,
    SourceTensor,
    Workspace,
    copyable,
    float32,
)
from launcher_scripts.checkpoint.layout.inverses import Blocks, RowGroups
from launcher_scripts.checkpoint.layout.layouts import (
    LAYOUTS,
    Layout,
    full_blocks,
)
from launcher_scripts.checkpoint.layout.tasks import Task, source_of
from launcher_scripts.checkpoint.sources.huggingface_stacked_experts import (
    ALTERNATE_TYPES,
    INPUTS_FIRST_TYPES,
    LAYER_TABLE,
    PROJECTION,
    PROJECTION_NORM,
    TABLE,
    TABLE_ROWS,
    stacked_place,
)
from launcher_scripts.common.errors import CheckpointError

_COMPARED = 1 << 20


@dataclass(frozen=True)
class VocabularyRows:
    """The first rows of a table of the vocabulary, or values of its bias: others are padding."""

    count: int

    def sources(self) -> Iterable[tuple[str, SourceTensor]]:
        """Return no tensors: it is a number."""
        return ()

    def apply(self, blocks: Blocks) -> Blocks:
        return [[unit[: self.count] for unit in block] for block in blocks]


@dataclass(frozen=True)
class TensorPart:
    """Rows of a target tensor: those that one task has, at `index` among its source tensors.

    shared: other tasks have further rows of the tensor
    """

    task: Task
    index: int
    layout: Layout
    shared: bool = False

    @property
    def source(self) -> SourceTensor | None:
        """The source tensor, if it is the target's already."""
        same = self.task.layout is self.layout and not self.task.changes
        return self.task.tensors[self.index] if same and not self.shared else None

    def groups(self, workspace: Workspace | None = None) -> RowGroups:
        return self.inverse(self.task.blocks(workspace))[self.index]

    def inverse(self, blocks: Blocks) -> list[RowGroups]:
        """Source tensors of blocks in the stored form."""
        if self.layout.inverse is None:
            raise CheckpointError(f"the layout of {self.task.name} has no inverse")
        return self.layout.inverse(blocks, self.task.config)

    def shape(self) -> tuple[int, ...]:
        """The shape of its rows, found with arrays that take no memory."""
        task = self.task
        if self.source is not None:
            return self.source.shape
        values = np.broadcast_to(np.zeros((), "u1"), task.spec.shape_on(task.config, 1))
        blocks = full_blocks(task.spec, task.config, values)
        return shape_of(self.inverse(blocks)[self.index])


def shape_of(groups: RowGroups) -> tuple[int, ...]:
    first = [array.shape for array in groups[0]]
    if not first[0]:
        return ()
    if len(first[0]) == 1:
        return (sum(array.shape[0] for group in groups for array in group),)
    rows = sum(group[0].shape[0] for group in groups)
    return (rows, sum(shape[1] for shape in first), *first[0][2:])


@dataclass(frozen=True)
class TargetTensor:
    """A tensor to write: its parts follow one another along the first axis.

    shape:     as it is written, also where that only adds axes to the rows
    columns:   number of parts whose rows are columns here; 0: none are
    alternate: these columns take turns
    adjacent:  the parts lie side by side
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[TensorPart, ...]
    columns: int = 0
    alternate: bool = False
    adjacent: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def stored_dtype(self) -> np.dtype[Any] | None:
        """The type of the source's files, where all values are taken from them as they are."""
        sources = [part.source for part in self.parts]
        dtypes = {source.dtype for source in sources if source is not None and source.pieces}
        plain_source = None not in sources and len(dtypes) == 1
        dtype = dtypes.pop() if plain_source else None
        return dtype if dtype in FLOATS else None

    def groups(self, workspace: Workspace) -> Iterable[list[NDArray[Any]]]:
        """Consecutive groups of rows, each of arrays side by side."""
        for start in range(0, len(self.parts), self.columns) if self.columns else ():
            parts = self.parts[start : start + self.columns]
            sides = [matrix_of(_read(part, Workspace())) for part in parts]
            arrays = [copyable(side).T for side in sides]
            full = np.concatenate(arrays, axis=-1)
            if self.alternate:
                full = np.stack(arrays, axis=-1).reshape(full.shape)
            yield [full.view(sides[0].dtype)]
        if self.adjacent:
            sides = [matrix_of(_read(part, Workspace())) for part in self.parts]
            step = max(_COMPARED // self.shape[1], 1)
            for row in range(0, self.shape[0], step):
                yield [side[row : row + step][: self.shape[0] - row] for side in sides]
        for part in () if self.columns or self.adjacent else self.parts:
            yield from _read(part, workspace)


def _read(part: TensorPart, workspace: Workspace) -> RowGroups:
    source = part.source
    return part.groups(workspace) if source is None else [[source.read(workspace)]]


def target_tensors(
    tasks: Sequence[Task], dialects: Sequence[str], problems: list[str]
) -> dict[str, TargetTensor]:
    """Return weight table's name -> tensor, of a model whose names are of these dialects.

    problems: gets what has no place in such a model
    """
    parts: dict[str, list[TensorPart]] = {}
    for task in tasks:
        source = source_of(task.spec, dialects)
        if source is None:
            if task.spec.required:
                problems.append(f"it has no place for {task.name}")
            continue
        layout = LAYOUTS[source.layout]
        is_source = task.layout is layout and not (task.changes or layout.joined)
        if layout.inverse is None and not is_source:
            problems.append(f"{task.name} cannot be computed back (layout {source.layout})")
            continue
        if not source.keys:
            if not _is_computed(task, layout):
                problems.append(f"its {task.name} has other values than the model's")
            continue
        for index, key in enumerate(source.keys):
            name = key if task.layer is None else key.replace("*", str(task.layer))
            parts.setdefault(name, []).append(TensorPart(task, index, layout))
    result = {}
    for name, members in parts.items():
        try:
            result[name] = _tensor(name, members, problems)
        except ValueError:  # an inverse that these sizes do not fit, such as an odd rotary size
            problems.append(f"{name} has another shape")
    return result


def _is_computed(task: Task, layout: Layout) -> bool:
    """True if the stored tensor is what the layout computes without a source."""
    if not task.keys and task.layout is layout:
        return True
    expected = copyable(float32(np.asarray(layout.apply([], task.config))))
    values = np.concatenate([float32(unit) for block in task.blocks() for unit in block], axis=-1)
    return values.shape == expected.shape and np.allclose(values, expected, rtol=1e-6, atol=1e-7)


def _tensor(name: str, parts: list[TensorPart], problems: list[str]) -> TargetTensor:
    """One tensor of all rows that claim it; rows that share it must agree."""
    by_index: dict[int, list[TensorPart]] = {}
    for part in parts:
        by_index.setdefault(part.layout.part, []).append(part)
    selected = []
    for index in sorted(by_index):
        alike = sorted(by_index[index], key=lambda part: not part.layout.is_exact)
        first = alike[0]
        for other in alike[1:]:
            if other.layout.is_exact and not _agree(first, other):
                problems.append(f"{first.task.name} and {other.task.name} must be equal")
        selected.append(first)
    if len({part.task.keys for part in selected}) == 1 and all(part.source for part in selected):
        selected = selected[:1]  # the source has all rows in one tensor, too
    elif len(selected) > 1:
        selected = [replace(part, shared=True) for part in selected]
    shapes = [part.shape() for part in selected]
    shape = (sum(shape[0] for shape in shapes), *shapes[0][1:]) if shapes[0] else ()
    return TargetTensor(name, shape, tuple(selected))


def _agree(one: TensorPart, other: TensorPart) -> bool:
    """True if two rows of the table hold the same values for one tensor."""
    tensors = [part.task.tensors[part.index :][:1] for part in (one, other)]
    if tensors[0] and tensors[0][0] is tensors[1][0] and one.task.changes == other.task.changes:
        return True
    first, second = (matrix_of(part.groups(Workspace())) for part in (one, other))
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    step = max(_COMPARED // max(first[:1].size, 1), 1)
    return all(
        np.array_equal(copyable(first[row : row + step]), copyable(second[row : row + step]))
        for row in range(0, len(first), step)
    )


def matrix_of(groups: RowGroups) -> NDArray[Any]:
    """The rows as one array."""
    if len(groups) == len(groups[0]) == 1:
        return groups[0][0]
    dtype = groups[0][0].dtype
    axis = -1 if groups[0][0].ndim > 1 else 0
    rows = [np.concatenate([copyable(array) for array in group], axis=axis) for group in groups]
    full: NDArray[Any] = np.concatenate(rows)
    return full.view(dtype)


def without_padding(tasks: Sequence[Task], config: Any, rows: int) -> tuple[list[Task], Any]:
    """The tasks and the hyperparameters of a model with so many rows of the vocabulary."""
    cut = replace(config, vocab_size=rows)
    result = []
    for task in tasks:
        changes = task.changes
        if task.spec.shape[0] == "vocab_size":
            changes = (*changes, VocabularyRows(rows))
        result.append(replace(task, config=cut.of_layer(task.layer), changes=changes))
    # The transposed copy of a T5's table is made of the same tensor.
    return [
        task for task in result if task.spec.shape[-1:] != ("vocab_size",) or _is_row(task)
    ], cut


def _is_row(task: Task) -> bool:
    return len(task.spec.shape) == 1


def centered(tasks: Sequence[Task], config: Any) -> tuple[list[Task], Any] | None:
    """The same model with norms that multiply by their weight plus 1; None if it stores none so."""
    layout = LAYOUTS["plus_one"]
    if all(task.layout is not layout for task in tasks) or not hasattr(
        config, "zero_centered_norm"
    ):
        return None
    stored = [
        replace(task, layout=LAYOUTS["as_is"]) if task.layout is layout else task for task in tasks
    ]
    return stored, replace(config, zero_centered_norm=True)


def restacked(tensors: Mapping[str, TargetTensor], model_type: str) -> dict[str, TargetTensor]:
    """The tensors, those of all experts of a layer as one where the model type stores them so."""
    result: dict[str, TargetTensor] = {}
    stacks: dict[str, list[tuple[int, int, TargetTensor]]] = {}
    for name, tensor in tensors.items():
        position = stacked_place(name, model_type)
        if position is None:
            result[name] = tensor
        else:
            stack, expert, part = position
            stacks.setdefault(stack, []).append((expert, part, tensor))
    for name, members in stacks.items():
        members.sort(key=lambda member: member[:2])
        result[name] = _stacked(name, members, model_type)
    return result


def _stacked(
    name: str, members: Sequence[tuple[int, int, TargetTensor]], model_type: str
) -> TargetTensor:
    count = 1 + max(expert for expert, _, _ in members)
    sides = len(members) // count
    rows, *inputs = members[0][2].shape
    shape: tuple[int, ...] = (count, sides * rows, *inputs)
    inputs_first = model_type in INPUTS_FIRST_TYPES
    if inputs_first and inputs:
        shape = (count, *inputs, sides * rows)
    parts = tuple(part for _, _, tensor in members for part in tensor.parts)
    columns = sides if inputs_first else 0
    return TargetTensor(name, shape, parts, columns, model_type in ALTERNATE_TYPES)


def of_all_layers(
    tensors: Mapping[str, TargetTensor], raw: dict[str, Any], problems: list[str]
) -> dict[str, TargetTensor]:
    """The tensors, layers' parts of a table of all layers joined, and without values that are keys.

    raw: config.json, which gets the rows of that table
    """
    result = dict(tensors)
    tables = _popped(result, LAYER_TABLE)
    if tables:
        first = tables[0]
        rows = min(raw.get(TABLE_ROWS) or first.shape[0], first.shape[0])
        raw[TABLE_ROWS] = rows
        columns = sum(table.shape[1] for table in tables)
        parts = tuple(part for table in tables for part in table.parts)
        result[TABLE] = TargetTensor(TABLE, (rows, columns), parts, adjacent=True)
        for name in (PROJECTION, PROJECTION_NORM):
            members = _popped(result, name)
            if name == PROJECTION_NORM:
                members = members[:1]
            shape = (sum(member.shape[0] for member in members), *members[0].shape[1:])
            parts = tuple(part for member in members for part in member.parts)
            result[name] = TargetTensor(name, shape, parts)
    for name in [name for name in result if raw.get("attention_k_eq_v") and ".k_proj." in name]:
        kinds, layer = raw.get("layer_types") or (), int(name.split(".")[1])
        if layer < len(kinds) and kinds[layer] == "full_attention":
            keys, values = (
                matrix_of([*tensor.groups(Workspace())])
                for tensor in (result[name], result.pop(name.replace("k_proj", "v_proj")))
            )
            if not np.array_equal(copyable(keys), copyable(values)):
                problems.append(f"{name} must be equal to the values' projection")
    return result


def _popped(tensors: dict[str, TargetTensor], name: str) -> list[TargetTensor]:
    """Take the tensors of this name out, in the order of their layers."""
    names = (key for key in tensors if re.fullmatch(rf"layers\.\d+\.{re.escape(name)}", key))
    return [tensors.pop(key) for key in sorted(names, key=lambda key: int(key.split(".")[1]))]


def transformers_name(name: str, prefix: str) -> str:
    """A tensor's name in a whole model: its head lies beside the model that has the prefix."""
    return name if re.match(r"(lm_head|final_logits_bias|embed_out)\b", name) else prefix + name


# How the names of tensors begin where not with `model.`.
_PREFIXES = {
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gpt_neo", "gptj", "codegen"), "transformer."),
    **dict.fromkeys(("bloom", "mpt", "falcon"), "transformer."),
    **dict.fromkeys(("t5", "mt5", "umt5"), ""),
    "gpt_neox": "gpt_neox.",
}


def name_prefix(model_type: str) -> str:
    """Return how the names of a model's tensors begin, its head's excepted."""
    return _PREFIXES.get(model_type, "model.")
