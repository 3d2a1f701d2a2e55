"""Names of a source's tensors as the weight table has them; two sources of one name are refused."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar

from launcher_scripts.common.errors import CheckpointError, Problems

_MAX_LISTED = 10
# Modules that a training puts around others: torch.compile, FSDP, activation checkpointing.
_INNER = re.compile(
    r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\."
)
# Modules around the whole model: PEFT, DistributedDataParallel.
_OUTER = ("base_model.model.", "module.")
Value = TypeVar("Value")


def renamed(tensors: Iterable[tuple[str, str, Value]], origin: str) -> dict[str, Value]:
    """New name -> value of triples (name in the source, new name, value).

    origin: the source, for errors
    Raises CheckpointError with both source names of every name that two of them become.
    """
    values: dict[str, Value] = {}
    sources: dict[str, str] = {}
    clashes: list[str] = []
    for source, name, value in tensors:
        if name in sources:
            clashes.append(
                f"{sources[name]} and {source} are both the model's {name}; expected one of them"
            )
        sources.setdefault(name, source)
        values.setdefault(name, value)
    problems = Problems(f"the names in {origin}")
    problems.add_first(clashes, _MAX_LISTED)
    problems.raise_if_any(CheckpointError)
    return values


def unwrapped(name: str) -> tuple[str, str]:
    """A tensor's name in its model, and the names of the modules around it that were removed."""
    plain = _INNER.sub("", name)
    removed = "".join(_INNER.findall(name))
    while prefix := next((each for each in _OUTER if plain.startswith(each)), ""):
        plain = plain.removeprefix(prefix)
        removed = prefix + removed
    return plain, removed
