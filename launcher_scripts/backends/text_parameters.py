"""Parameters of a request that stand for input tensors.

Triton hands on what `/generate` has in "parameters", and each of its keys that names no input.
Copied beside the text models of a repository, so it imports nothing of this project.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

# Triton's own, which `/generate` leaves among them.
TRITONS = ("id", "timeout", "priority", "binary_data_output")
_UNSIGNED_32, _SIGNED_32, _UNSIGNED_64 = (0, 2**32 - 1), (-(2**31), 2**31 - 1), (0, 2**64 - 1)
_RANGES = {"UINT32": _UNSIGNED_32, "INT32": _SIGNED_32, "UINT64": _UNSIGNED_64}
_TYPES = {"BOOL": bool, "STRING": str}
_NUMBERS = "FP32"


class ParameterError(Exception):
    """A parameter that cannot be used; the message is meant for the client."""


def parameter_values(
    parameters: str,
    kinds: Mapping[str, str],
    present: Collection[str],
    others: Collection[str] = (),
) -> dict[str, Any]:
    """The inputs that the parameters stand for, each with the one value for all rows.

    parameters: as Triton hands them on, JSON
    kinds:      input -> its type as config.pbtxt says it, of those that may be a parameter
    given:      inputs that came as tensors
    others:     parameters that stand for no input

    Raises ParameterError for a name that is none of `kinds`, one that is in `present`, or a value
    of another type.
    """
    result = {}
    for name, value in json.loads(parameters or "{}").items():
        if name in TRITONS or name in others:
            continue
        if name not in kinds:
            choices = ", ".join(sorted(kinds))
            raise ParameterError(f"unknown parameter; got {name!r}; choices: {choices}")
        if name in present:
            raise ParameterError(f"{name} came as an input and as a parameter; send one")
        kind = kinds[name].removeprefix("TYPE_")
        if not _fits(value, kind):
            raise ParameterError(f"the parameter {name} takes {kind}; got {value!r}")
        result[name] = value
    return result


def seconds_allowed(request: Any) -> float | None:
    """Seconds that a request's client waits for the response; None for no limit.

    Raises ParameterError.
    """
    microseconds = request.timeout() or json.loads(request.parameters() or "{}").get("timeout", 0)
    if not _fits(microseconds, "UINT64"):
        raise ParameterError(f"the parameter timeout takes microseconds; got {microseconds!r}")
    return microseconds / 1e6 if microseconds else None


def _fits(value: Any, kind: str) -> bool:
    if kind in _TYPES:
        return isinstance(value, _TYPES[kind])
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if kind == _NUMBERS:
        return True
    minimum, maximum = _RANGES.get(kind, (1, 0))
    return isinstance(value, int) and minimum <= value <= maximum
