"""Checkpoints with one file per tensor- and pipeline-parallel rank, seen as whole tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.source_tensor import SourceTensor, concatenated
from launcher_scripts.common.errors import CheckpointError, Problems, problem
from launcher_scripts.models.family import Partition

StateDict = Mapping[str, SourceTensor]
Shards = Mapping[str, tuple[SourceTensor, ...]]

_LAYER = re.compile(r"((?:.+\.)?(?:encoder|decoder)\.(?:model\.)?layers\.)(\d+)(\..+)")


def rank_files(
    archive: Archive, root: str, patterns: Sequence[re.Pattern[str]], choices: Sequence[str]
) -> list[list[str]]:
    """Names of the ranks' files below `root`, [pipeline stage][tensor-parallel rank].

    patterns: what such a name looks like behind `root`; groups `tp` and `pp` are its rank
    choices:  names to look for, for the error

    Raises CheckpointError when there is none, when one is missing, or when one is there twice.
    """
    files: dict[tuple[int, int], str] = {}
    for name in archive.names():
        for pattern in patterns:
            match = pattern.fullmatch(name.removeprefix(root)) if name.startswith(root) else None
            if match is None:
                continue
            places = match.groupdict()
            place = (int(places.get("pp") or 0), int(places.get("tp") or 0))
            if place in files:
                raise CheckpointError(
                    problem(f"{archive.path} has two files of one rank", got=[files[place], name])
                )
            files[place] = name
    if not files:
        raise CheckpointError(problem(f"{archive.path} holds no weights", choices=choices))
    stages = 1 + max(pp for pp, _ in files)
    ranks = 1 + max(tp for _, tp in files)
    problems = Problems(f"the checkpoint {archive.path}")
    for pp in range(stages):
        for tp in range(ranks):
            if (pp, tp) not in files:
                problems.add(f"the file of tensor-parallel rank {tp}, stage {pp} is missing")
    problems.raise_if_any(CheckpointError)
    return [[files[pp, tp] for tp in range(ranks)] for pp in range(stages)]


def merged_stages(stages: Sequence[Sequence[StateDict]]) -> dict[str, tuple[SourceTensor, ...]]:
    """Name -> shards, with the layers of all pipeline stages numbered through.

    Stages start counting at 0; a stage begins where the one before it ended, for the layers of
    an encoder and of a decoder each. A tensor that several stages hold (a tied table) is taken
    from the first.
    """
    merged: dict[str, tuple[SourceTensor, ...]] = {}
    first: dict[str, int] = {}
    for ranks in stages:
        counts: dict[str, int] = {}
        for name in {name: None for rank in ranks for name in rank}:
            match = _LAYER.fullmatch(name)
            target = name
            if match:
                stack, number = match[1], int(match[2])
                counts[stack] = max(counts.get(stack, 0), number + 1)
                target = f"{stack}{first.get(stack, 0) + number}{match[3]}"
            shards = tuple(rank[name] for rank in ranks if name in rank)
            if len(shards) < len(ranks):
                raise CheckpointError(
                    problem(f"{name} is missing on a tensor-parallel rank", got=len(shards))
                )
            merged.setdefault(target, shards)
        first = {stack: first.get(stack, 0) + counts.get(stack, 0) for stack in {*first, *counts}}
    return merged


def find_whole(
    shards: Shards, name: str, partition: Partition, sections: int
) -> SourceTensor | None:
    """One whole tensor, merged from its shards as `partition` says; None if it is not there.

    The source's weights are [out, in], the transpose of the stored form.
    """
    parts = shards.get(name)
    if parts is None:
        return None
    if partition is Partition.REPLICATED:
        return parts[0]
    axis = 1 if partition is Partition.ROW_PARALLEL else 0
    return concatenated(parts, axis, sections)
