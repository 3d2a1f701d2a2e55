"""Adapters of any maker merged into a base of any other: LoRA, DoRA, tensors trained as a whole.

An adapter names the tensors of its maker's model. The weight table says how these become the
stored form, and so does what the adapter learned for them: it is laid out like its tensor and
merged into the stored form of the base, in float32, when that is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.formats.source_tensor import SourceTensor, float32
from launcher_scripts.checkpoint.layout.inverses import Blocks
from launcher_scripts.checkpoint.layout.layouts import LAYOUTS, Layout
from launcher_scripts.checkpoint.layout.tasks import Task, fits_spec, source_of, stored_blocks
from launcher_scripts.common.errors import CheckpointError, Problems, lookup
from launcher_scripts.models.adapters import LORA_TARGETS
from launcher_scripts.models.family import ModelConfig, Partition, WeightSpec

_MAX_LISTED = 10
# That are made float32 at a time.
_COLUMNS = 64
_ZERO = np.float32(0)


class Update(Protocol):
    """An adapter's contents for one tensor of its maker's model."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor it is for, or of the rows that it replaces."""
        ...

    def tensors(self) -> Sequence[SourceTensor]: ...

    def problem(self) -> str | None:
        """Return the first contradiction within itself; None if consistent."""
        ...

    def arrays(self) -> Sequence[NDArray[Any]]:
        """Its values in float32, each laid out like the tensor."""
        ...

    def apply(self, unit: NDArray[Any], *values: NDArray[Any]) -> NDArray[Any]:
        """A part of the stored form [..., columns], of any floats, merged with the same part of
        its values, whose memory it may take."""
        ...


@dataclass(frozen=True)
class LowRank:
    """LoRA (arXiv:2106.09685): W + scale * up @ down, W [out, in], up [out, rank],
    down [rank, in]. With a `magnitude` [out] DoRA (arXiv:2402.09353): the sum's rows are then
    given these lengths.

    input_first: W is stored [in, out], as embeddings and GPT-2's layers are
    """

    down: SourceTensor
    up: SourceTensor
    scale: float
    magnitude: SourceTensor | None = None
    input_first: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        shape = (self.up.shape[0], self.down.shape[1])
        return shape[::-1] if self.input_first else shape

    def tensors(self) -> Sequence[SourceTensor]:
        pair = (self.down, self.up)
        return pair if self.magnitude is None else (*pair, self.magnitude)

    def problem(self) -> str | None:
        up, down = self.up.shape, self.down.shape
        if len(up) != 2 or len(down) != 2 or up[1] != down[0]:
            return f"its matrices {up} and {down} do not fit each other"
        if self.magnitude is not None and self.magnitude.shape != up[:1]:
            return f"its magnitudes {self.magnitude.shape} do not fit its matrix {up}"
        return None

    def arrays(self) -> Sequence[NDArray[Any]]:
        update = float32(self.up.read()) @ float32(self.down.read())
        update *= np.float32(self.scale)
        laid = update.T if self.input_first else update
        return [laid] if self.magnitude is None else [laid, float32(self.magnitude.read())]

    def apply(self, unit: NDArray[Any], *values: NDArray[Any]) -> NDArray[Any]:
        merged = _sum(values[0], unit)
        if self.magnitude is not None:
            merged *= values[1] / np.linalg.norm(merged, axis=0)
        return merged


@dataclass(frozen=True)
class Added:
    """A vector that is added, times a scale."""

    vector: SourceTensor
    scale: float

    @property
    def shape(self) -> tuple[int, ...]:
        return self.vector.shape

    def tensors(self) -> Sequence[SourceTensor]:
        return (self.vector,)

    def problem(self) -> str | None:
        return None

    def arrays(self) -> Sequence[NDArray[Any]]:
        return [float32(self.vector.read()) * np.float32(self.scale)]

    def apply(self, unit: NDArray[Any], *values: NDArray[Any]) -> NDArray[Any]:
        return _sum(values[0], unit)


@dataclass(frozen=True)
class Replaced:
    """A tensor that was trained as a whole, or some of its rows."""

    values: SourceTensor
    rows: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def tensors(self) -> Sequence[SourceTensor]:
        return (self.values,)

    def problem(self) -> str | None:
        if self.rows is not None and len(self.rows) != self.values.shape[0]:
            return f"it has {self.values.shape[0]} rows for {len(self.rows)} tokens"
        return None

    def arrays(self) -> Sequence[NDArray[Any]]:
        return [float32(self.values.read())]

    def apply(self, unit: NDArray[Any], *values: NDArray[Any]) -> NDArray[Any]:
        if self.rows is None:
            return values[0]
        merged = np.array(float32(unit))
        merged[list(self.rows)] = values[0]
        return merged


def _sum(values: NDArray[Any], unit: NDArray[Any]) -> NDArray[Any]:
    """values + unit in the memory of the values; only a part of the unit is made float32 at a
    time."""
    for start in range(0, unit.shape[-1], _COLUMNS):
        columns = (..., slice(start, start + _COLUMNS))
        values[columns] += float32(unit[columns])
    return values


@dataclass(frozen=True)
class LearnedAdapter:
    """The contents of one checkpoint of an adapter.

    updates:  name of a tensor of the maker's model -> what was learned for it, in order
    dialects: sets of dialects of the weight table whose names they may be; of several the one
              that knows the most names counts
    targets:  (name of a module, whether it is a linear layer) -> whether LoRA was learned for it;
              None: its configuration does not say
    ties:     tables that the base ties were trained as one, where they were trained whole
    tables:   row of the weight table -> a table of the vocabulary in the place of the base's, which
              has other rows, or is tied to another table
    notes:    what a user should know
    """

    path: Path
    updates: Mapping[str, Sequence[Update]]
    dialects: Sequence[Sequence[str]]
    targets: Callable[[str, bool], bool | None] = lambda _module, _linear: None
    ties: bool = False
    notes: tuple[str, ...] = ()
    tables: Mapping[str, SourceTensor] = dataclasses.field(default_factory=dict)

    def merged(self, tasks: Sequence[Task]) -> list[Task]:
        """The tasks of an export with what was learned for them; raises as `places`."""
        targets = self.places(tasks)
        changes: dict[int, list[_Merged]] = {}
        for name, values in self.updates.items():
            for target in targets[name]:
                merged = [_Merged(name, target, target.laid(value)) for value in values]
                changes.setdefault(target.number, []).extend(merged)
        return [
            dataclasses.replace(task, changes=(*task.changes, *changes.get(number, ())))
            for number, task in enumerate(tasks)
        ]

    def places(self, tasks: Sequence[Task]) -> dict[str, list[Target]]:
        """Return the targets of every name of the adapter's maker in an export of these tasks.

        Raises CheckpointError with everything that does not fit the base.
        """
        problems = Problems(f"the adapter {self.path}")
        claims = self._claims(tasks, problems)
        unclaimed = sorted(self.updates.keys() - claims.keys())
        problems.add_first([f"no module of the base has {name}" for name in unclaimed], _MAX_LISTED)
        for name in sorted(self.updates.keys() & claims.keys()):
            for value in self.updates[name]:
                self._check(name, value, claims[name], problems)
        self._check_targets(claims, problems)
        problems.raise_if_any(CheckpointError)
        return claims

    def _claims(self, tasks: Sequence[Task], problems: Problems) -> dict[str, list[Target]]:
        """Return the targets of every name of the adapter's maker."""
        every = [_claims(tasks, dialects) for dialects in self.dialects]
        consistent = [claims for claims in every if not _contradict(claims)] or every
        counts = [len(claims.keys() & self.updates.keys()) for claims in consistent]
        best = [claims for claims, n in zip(consistent, counts, strict=True) if n == max(counts)]
        unclear = [
            f"{name} is laid out differently in several families of its maker, and the base does "
            "not say of which it is"
            for name, values in self.updates.items()
            for value in values
            if len({_meaning(value, claims.get(name, ())) for claims in best}) > 1
        ]
        problems.add_first(unclear, _MAX_LISTED)
        return best[0]

    def _check(
        self, name: str, value: Update, targets: Sequence[Target], problems: Problems
    ) -> None:
        wrong = value.problem()
        if wrong:
            problems.add(f"{name}: {wrong}")
            return
        for target in targets:
            if not target.fits(target.laid(value)):
                problems.add(
                    f"what was learned for {name} does not fit the base's {target.spec.name}",
                    got=value.shape,
                    choices=[f"what makes {target.spec.shape_on(target.config, 1)}"],
                )
                return
        if not self._keeps_tie(value, targets):
            problems.add(
                f"{name} was trained alone, but in the base it is the output layer's table too",
                choices=["an adapter of a base whose tables are two"],
            )

    def _keeps_tie(self, value: Update, targets: Sequence[Target]) -> bool:
        """Return whether a table that is the output layer's too stays the same for both."""
        tables = [target for target in targets if target.table]
        if len(tables) < 2 and not (tables and getattr(tables[0].config, "tied_embeddings", False)):
            return True
        return isinstance(value, Replaced) and (self.ties or value.rows is not None)

    def _check_targets(self, claims: Mapping[str, Sequence[Target]], problems: Problems) -> None:
        """LoRA is there for every module that the configuration names, and for no other."""
        missing, others = [], []
        for name, targets in claims.items():
            module = name.removesuffix(".weight")
            if module == name or len(targets[0].spec.shape) != 2:
                continue
            spec = targets[0].spec
            stem = spec.name.removeprefix("layers.*.").removesuffix(".weight")
            linear = spec.partition.per_rank or stem in LORA_TARGETS
            expected = self.targets(module, linear)
            has_low_rank = any(isinstance(value, LowRank) for value in self.updates.get(name, ()))
            if expected and not has_low_rank:
                missing.append(f"LoRA of {module} is missing, which its configuration names")
            if has_low_rank and expected is False:
                others.append(f"its configuration does not name {module}, which has LoRA")
        problems.add_first(missing, _MAX_LISTED)
        problems.add_first(others, _MAX_LISTED)


@dataclass(frozen=True)
class Target:
    """The target of a tensor of the maker's model: the task's number, its row, and the index among
    the row's tensors."""

    number: int
    spec: WeightSpec
    config: ModelConfig
    layout: Layout
    index: int
    count: int

    @property
    def table(self) -> bool:
        """Return whether it is a table of the vocabulary."""
        return self.spec.partition is Partition.VOCAB_PARALLEL

    @property
    def blocks(self) -> range:
        """The blocks of the stored form that its rows are in."""
        count = max(1, len(self.spec.blocks))
        if self.count == 1:
            return range(count)
        if self.layout.rows is None:
            return range(self.index, self.index + 1)
        rows = self.layout.rows(self.config)[self.index]
        parts = self.stored(np.ones((rows, 1), dtype="f4"))
        used = [number for number, part in enumerate(parts) if part.any()]
        return range(used[0], used[-1] + 1)

    def laid(self, value: Update) -> Update:
        """The value, as layers are laid out there: GPT-2's are [in, out]."""
        input_first = self.layout is LAYOUTS["as_is"] and self.spec.partition.per_rank
        if isinstance(value, LowRank) and input_first:
            return dataclasses.replace(value, input_first=True)
        return value

    def fits(self, value: Update) -> bool:
        """Return whether the value has the tensor's shape. It is tried on arrays that take no
        memory."""
        expected = self.spec.shape_on(self.config, 1)
        rows = value.rows if isinstance(value, Replaced) else None
        if rows is not None:
            in_range = not rows or (min(rows) >= 0 and max(rows) < expected[0])
            return self.table and in_range and value.shape[1:] == expected[1:]
        try:
            blocks = self.stored(np.broadcast_to(_ZERO, value.shape))
            return fits_spec([[block] for block in blocks], self.spec, self.config)
        except (ValueError, IndexError):
            return False

    def stored(self, values: NDArray[Any]) -> list[NDArray[Any]]:
        """Values laid out like the tensor, as blocks of the stored form. Where a row is made of
        several tensors, each is a block, and the others are zero."""
        tensors = [
            values if number == self.index else np.broadcast_to(_ZERO, (size, *values.shape[1:]))
            for number, size in enumerate(self._rows(values))
        ]
        blocks = stored_blocks(self.layout, tensors, self.spec, self.config)
        return [block[0] if len(block) == 1 else np.concatenate(block, axis=-1) for block in blocks]

    def _rows(self, values: NDArray[Any]) -> list[int]:
        if self.count == 1:
            return [len(values)]
        if self.layout.rows is not None:
            return list(self.layout.rows(self.config))
        if self.count != len(self.spec.blocks):
            raise ValueError(f"{self.spec.name} is computed of several tensors")
        return [int(getattr(self.config, axis)) for axis in self.spec.blocks]


@dataclass(frozen=True)
class _Merged:
    """Everything learned for a tensor, as a plan.Change."""

    name: str
    place: Target
    value: Update

    def sources(self) -> Iterable[tuple[str, SourceTensor]]:
        return [(f"what was learned for {self.name}", part) for part in self.value.tensors()]

    def apply(self, blocks: Blocks) -> Blocks:
        parts = [self.place.stored(values) for values in self.value.arrays()]
        own = self.place.blocks if self.place.count > 1 else range(len(blocks))
        return [
            self._merged(block, [part[number] for part in parts])
            if number in own
            else [float32(unit) for unit in block]
            for number, block in enumerate(blocks)
        ]

    def _merged(
        self, block: Sequence[NDArray[Any]], parts: Sequence[NDArray[Any]]
    ) -> list[NDArray[Any]]:
        merged, start = [], 0
        for unit in block:
            stop = start + unit.shape[-1]
            columns = [part[..., start:stop] for part in parts]
            merged.append(self.value.apply(unit, *columns))
            start = stop
        return merged


def _contradict(claims: Mapping[str, Sequence[Target]]) -> bool:
    """Return whether a matrix would be two of the base's: its family has another kind of layers."""
    return any(
        len({target.layout for target in targets}) < len(targets)
        for targets in claims.values()
        if len(targets) > 1 and len(targets[0].spec.shape) == 2 and not targets[0].table
    )


def _meaning(value: Update, targets: Sequence[Target]) -> tuple[object, ...]:
    """Return a key for the targets of a tensor's rows: equal for dialects that agree."""
    rows = np.arange(
        value.up.shape[0] if isinstance(value, LowRank) else value.shape[0], dtype="f4"
    )
    meaning: list[object] = []
    for target in targets:
        try:
            stored = [block.tobytes() for block in target.stored(rows)]
        except (ValueError, IndexError):
            stored = []  # of another shape, which is found later
        meaning.append((target.number, target.laid(value) is value, *stored))
    return tuple(meaning)


def _claims(tasks: Sequence[Task], dialects: Sequence[str]) -> dict[str, list[Target]]:
    """Name of a tensor of these dialects -> where it goes."""
    result: dict[str, list[Target]] = {}
    for number, task in enumerate(tasks):
        source = source_of(task.spec, dialects)
        if source is None:
            continue
        layout = lookup(LAYOUTS, source.layout, "layout")
        for index, key in enumerate(source.keys):
            name = key if task.layer is None else key.replace("*", str(task.layer))
            target = Target(number, task.spec, task.config, layout, index, len(source.keys))
            result.setdefault(name, []).append(target)
    return result
