"""A pickle reader that can only build what tensors are made of.

A pickle names the callables it wants called. Here a name is looked up in a table of this
project's own inert classes and functions, never imported; any other name is an error. So a
malicious pickle can do nothing but fail.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from launcher_scripts.errors import CheckpointError

Globals = Mapping[tuple[str, str], Any]


class Opaque:
    """Stands for an object that is carried along but never looked at."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, _: object) -> None:
        pass


class Record:
    """Stands for a data object: its attributes are read like a mapping's keys."""

    def __init__(self, *_: object) -> None:
        self.state: dict[str, Any] = {}

    def __setstate__(self, state: object) -> None:
        self.state = state if isinstance(state, dict) else {}

    def __getitem__(self, name: str) -> Any:
        return self.state[name]

    def get(self, name: str) -> Any:
        return self.state.get(name)


class Ignored(Opaque):
    """Stands for an object of any class: whatever is put into it is forgotten."""

    def __call__(self, *_: object) -> Ignored:
        return self

    def __setitem__(self, _: object, __: object) -> None:
        pass

    def append(self, _: object) -> None:
        pass

    def extend(self, _: object) -> None:
        pass

    def add(self, _: object) -> None:
        pass


class AnyGlobal(dict[tuple[str, str], Any]):
    """Allows every name, and gives none a meaning but that of the plainest containers.

    For files that carry a training's state (optimizers, loops, hyperparameters) beside its weights.
    """

    def __init__(self) -> None:
        super().__init__({("__builtin__", kind.__name__): kind for kind in (dict, list, int)})

    def __contains__(self, _: object) -> bool:
        return True

    def __missing__(self, _: tuple[str, str]) -> Any:
        return Ignored


PLAIN_GLOBALS: Globals = {
    ("collections", "OrderedDict"): OrderedDict,
    ("_io", "BytesIO"): Opaque,
    ("io", "BytesIO"): Opaque,
    ("_codecs", "encode"): Opaque,
    ("builtins", "set"): set,
    ("__builtin__", "set"): set,
}


def load(
    data: bytes,
    origin: str,
    allowed: Globals,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Unpickle `data` with no globals but PLAIN_GLOBALS and `allowed`.

    origin:     what the data is, for errors
    allowed:    (module, name) -> what stands for it
    persistent: resolves persistent ids (torch's storages)

    Raises CheckpointError for a forbidden name and for damaged data.
    """
    try:
        return _Reader(data, origin, allowed, persistent).load()
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{origin} is damaged: {type(error).__name__}: {error}") from error


class _Reader(pickle.Unpickler):
    def __init__(
        self,
        data: bytes,
        origin: str,
        allowed: Globals,
        persistent: Callable[[Any], Any] | None,
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._origin = origin
        self._allowed = allowed
        self._persistent = persistent

    def find_class(self, module: str, name: str) -> Any:
        for table in (PLAIN_GLOBALS, self._allowed):
            if (module, name) in table:
                return table[module, name]
        raise CheckpointError(
            f"{self._origin} asks for {module}.{name}, which no checkpoint of weights needs; "
            "it was not run, and the checkpoint is refused"
        )

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise CheckpointError(f"{self._origin} refers to data outside of it")
        return self._persistent(pid)
