"""The values of a Hugging Face config.json, each with the type it must have."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from launcher_scripts.common.errors import Problems

ACTIVATIONS = {
    "gelu": "gelu_erf",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
    "relu2": "squared_relu",
    "silu": "silu",
    "swish": "silu",
}
_REQUIRED = object()
MOST_LAYERS = 1 << 16
_Id = TypeVar("_Id", bound="int | None")


class RawConfig:
    """config.json with the names of its tensors; wrong and missing keys are reported at once.

    It remembers which keys were asked for: huggingface_keys.check_keys reports the others.

    notes: what has to be known of the model that is exported
    """

    def __init__(self, raw: Mapping[str, Any], keys: Collection[str], path: Path) -> None:
        self.raw = raw
        self.keys = keys
        self.problems = Problems(str(path))
        self.notes: list[str] = []
        self.asked: set[str] = set()
        self._defaults: dict[str, Any] = {}
        self.sections: dict[str, RawConfig] = {}

    def __call__(self, *names: str, default: Any = _REQUIRED) -> Any:
        """The value of the first of `names` that is there and not null.

        Names of one thing that say two things are a problem.
        """
        self.asked.update(names)
        found = {name: self.raw[name] for name in names if self.raw.get(name) is not None}
        values = list(found.values())
        if any(value != values[0] for value in values):
            self.problems.add(f"{' and '.join(found)} differ", got=values)
        if values:
            return values[0]
        default = next((self._defaults[name] for name in names if name in self._defaults), default)
        if default is _REQUIRED:
            self.problems.add(f"{' or '.join(names)} is missing")
            return 1
        return default

    def defaults(self, **values: Any) -> None:
        """Say what these keys mean in this model where the file does not have them.

        That rules over the defaults that a reader asks with, and what is said first rules.
        """
        self._defaults = {**values, **self._defaults}

    def unused(self, *names: str) -> None:
        """Say that these keys change nothing in this model, whatever their values."""
        self.asked.update(names)

    def size(self, *names: str, default: Any = _REQUIRED, least: int = 1) -> int:
        """A whole number."""
        found = self(*names, default=default)
        if type(found) is int and found >= least:
            return found
        self.problems.add(f"{' or '.join(names)} must be a whole number from {least} on", got=found)
        return 1

    def layers(self, *names: str, default: Any = _REQUIRED) -> int:
        """A number of layers, of which lists may be made."""
        found = self.size(*names, default=default)
        if found <= MOST_LAYERS:
            return found
        self.problems.add(f"{' or '.join(names)} must be at most {MOST_LAYERS}", got=found)
        return 1

    def real(self, name: str, default: float) -> float:
        """A number of at least 0."""
        found = self(name, default=default)
        if type(found) in (int, float) and found >= 0:
            return float(found)
        self.problems.add(f"{name} must be a number from 0 on", got=found)
        return default

    def numbers(self, name: str, count: int) -> list[float]:
        """As many numbers."""
        found = self(name, default=None)
        numbers = found if isinstance(found, list) else []
        if len(numbers) == count and all(type(number) in (int, float) for number in numbers):
            return [float(number) for number in numbers]
        self.problems.add(f"{name} must be a list of {count} numbers", got=found)
        return [1.0] * count

    def flag(self, name: str, default: bool) -> bool:
        found = self(name, default=default)
        if isinstance(found, bool):
            return found
        self.problems.add(f"{name} must be true or false", got=found)
        return default

    def text(self, name: str, default: str) -> str:
        found = self(name, default=default)
        if isinstance(found, str):
            return found
        self.problems.add(f"{name} must be a text", got=found)
        return default

    def section(self, *names: str) -> RawConfig:
        """A mapping in the file; an empty one where it has none."""
        found = self(*names, default={})
        if not isinstance(found, Mapping):
            self.problems.add(f"{' or '.join(names)} must be a mapping", got=found)
            found = {}
        name = next((name for name in names if self.raw.get(name) is not None), names[0])
        section = RawConfig(found, self.keys, Path())
        section.problems = self.problems
        self.sections[name] = section
        return section

    def token(self, name: str, default: _Id) -> int | _Id:
        """A token id; the first one where a list is allowed. Below 0 there is no such token."""
        default = self._defaults.get(name, default)
        found = self(name, default=default)
        if isinstance(found, list) and found:
            found = found[0]
        if found is not None and type(found) is not int:
            self.problems.add(f"{name} must be a token id", got=found)
            return default
        return default if found is None or found < 0 else found

    def activation(self, name: str, default: Any = _REQUIRED) -> str:
        found = self(name, default=default)
        if not isinstance(found, str) or found not in ACTIVATIONS:
            self.problems.add(f"unknown {name}", got=found, choices=ACTIVATIONS)
            return "gelu"
        return ACTIVATIONS[found]

    def only(self, **values: Any) -> None:
        """Refuse anything but these values, which are also the defaults and the meaning of null."""
        self.asked.update(values)
        for name, value in values.items():
            found = self.raw.get(name)
            if found is not None and found != value:
                self.problems.add(f"{name} is not supported", got=found, choices=(value,))

    def head_size(self, hidden: int, heads: int) -> int:
        if hidden % heads and not self.problems.messages:
            self.problems.add(f"the hidden size {hidden} is not a multiple of the heads", got=heads)
        return max(hidden // heads, 1)
