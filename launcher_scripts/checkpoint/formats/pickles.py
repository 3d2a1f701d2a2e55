"""A pickle reader that can only build what tensors are made of.

A pickle names the callables it wants called. Here a name is looked up in a table of this
project's own inert classes and functions, never imported; any other name is an error. What the
pickle gets is a token of its own, which it can call and pass on, but neither read nor change. So a
malicious pickle can do nothing but fail.

Python's reader in Python is the base: its memo is a dictionary, where the one in C has as many
places as the pickle says.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from launcher_scripts.common.errors import CheckpointError

Globals = Mapping[tuple[str, str], Any]


class Token:
    """What a pickle gets for a name: `meaning` is what the name stands for."""

    __slots__ = ("meaning",)

    def __init__(self, meaning: Any) -> None:
        self.meaning = meaning


def meaning(value: Any) -> Any:
    """What a pickle's value stands for, if that is a token."""
    return value.meaning if isinstance(value, Token) else value


class Opaque:
    """Stands for an object that is carried along but never looked at."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __setstate__(self, _: object) -> None:
        pass


class Record:
    """Stands for a data object: its attributes are read like a mapping's keys."""

    def __init__(self, *_: object, **__: object) -> None:
        self.state: dict[str, Any] = {}

    def __setstate__(self, state: object) -> None:
        self.state = state if isinstance(state, dict) else {}

    def __getitem__(self, name: str) -> Any:
        return self.state[name]

    def get(self, name: str) -> Any:
        return self.state.get(name)


class Ignored(Opaque):
    """Stands for an object of any class: whatever is put into it is forgotten."""

    def __call__(self, *_: object, **__: object) -> Ignored:
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
        kinds = {"dict": _mapping, "list": _sequence, "int": int}
        super().__init__({("__builtin__", name): kind for name, kind in kinds.items()})

    def __contains__(self, _: object) -> bool:
        return True

    def __missing__(self, _: tuple[str, str]) -> Any:
        return Ignored


def _sequence(items: Any = ()) -> list[Any]:
    if not isinstance(items, (list, tuple, set, frozenset)):
        raise TypeError(f"a list of {type(items).__name__}")
    return list(items)


def _set(items: Any = ()) -> set[Any]:
    return {_key(item) for item in _sequence(items)}


def _mapping(items: Any = ()) -> OrderedDict[Any, Any]:
    pairs = items.items() if isinstance(items, dict) else _sequence(items)
    return OrderedDict((_key(key), value) for key, value in pairs)


PLAIN_GLOBALS: Globals = {
    ("collections", "OrderedDict"): _mapping,
    ("_io", "BytesIO"): Opaque,
    ("io", "BytesIO"): Opaque,
    ("_codecs", "encode"): Opaque,
    ("builtins", "set"): _set,
    ("__builtin__", "set"): _set,
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
        found = _Reader(data, origin, allowed, persistent).load()
        _check_extent(found, _EXPANSION * len(data))
        return found
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{origin} is damaged: {type(error).__name__}: {error}") from error


# Shared parts written out may take this many times the pickle's bytes; nested as deep as this.
_EXPANSION = 64
_DEPTH = 100
_KEY_PARTS = 100
_PLAIN_KEYS = (str, bytes, int, float, type(None), Token, Opaque, Record)


def _key(key: Any) -> Any:
    """A dictionary's key: the hash of a large one would take long, that of a deep one the stack."""
    parts = [key]
    for part in parts:
        if isinstance(part, (tuple, frozenset)) and len(parts) < _KEY_PARTS:
            parts += part
        elif not isinstance(part, _PLAIN_KEYS):
            raise TypeError(f"a key of {type(part).__name__}")
    return key


def _check_extent(found: Any, most: int) -> None:
    """Refuse values that contain themselves, or each other so often that no reader would end."""
    sizes: dict[int, int] = {}

    def size(value: Any, depth: int) -> int:
        if isinstance(value, Record):
            value = value.state
        if not isinstance(value, (dict, list, tuple, set, frozenset)):
            return 1
        if id(value) not in sizes:
            if depth > _DEPTH:
                raise ValueError("nested too deeply")
            sizes[id(value)] = most + 1  # of one that contains itself
            parts = [*value, *value.values()] if isinstance(value, dict) else value
            sizes[id(value)] = 1 + sum(size(part, depth + 1) for part in parts)
        if sizes[id(value)] > most:
            raise ValueError("the same parts are repeated without end")
        return sizes[id(value)]

    size(found, 0)


class _Reader(pickle._Unpickler):
    """The opcodes that checkpoints need; all others are not part of `dispatch`."""

    # What the base class keeps while it loads.
    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        number: action
        for number, action in pickle._Unpickler.dispatch.items()
        if bytes([number])
        not in (
            *(pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.PERSID),
            *(pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
        )
    }

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

    def find_class(self, module: str, name: str) -> Token:
        for table in (PLAIN_GLOBALS, self._allowed):
            if (module, name) in table:
                return Token(table[module, name])
        raise CheckpointError(
            f"{self._origin} asks for {module}.{name}, which no checkpoint of weights needs; "
            "it was not run, and the checkpoint is refused"
        )

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise CheckpointError(f"{self._origin} refers to data outside of it")
        return self._persistent(pid)

    def _call(self, called: Any, args: Any, named: Any = None) -> None:
        """Call a token, or what was made of a class that is ignored."""
        known = isinstance(called, (Token, Ignored)) and callable(meaning(called))
        if not known or not isinstance(args, tuple):
            raise TypeError(f"a call of {type(called).__name__}")
        self.append(meaning(called)(*args, **(named or {})))

    def load_reduce(self) -> None:
        args = self.stack.pop()
        self._call(self.stack.pop(), args)

    def load_newobj_ex(self) -> None:
        named, args = self.stack.pop(), self.stack.pop()
        self._call(self.stack.pop(), args, named)

    def load_build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, (Opaque, Record)):
            target.__setstate__(state)
        elif not isinstance(target, OrderedDict):  # whose attributes carry nothing
            raise TypeError(f"a state for {type(target).__name__}")

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items(key, value)

    def load_setitems(self) -> None:
        self._set_items(*self.pop_mark())

    def _set_items(self, *items: Any) -> None:
        target = self.stack[-1]
        if not isinstance(target, (dict, Ignored)):
            raise TypeError(f"items of {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_key(key)] = value

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._set_items(*items)

    def load_additems(self) -> None:
        items = self.pop_mark()
        target = self.stack[-1]
        if not isinstance(target, (set, Ignored)):
            raise TypeError(f"members of {type(target).__name__}")
        for item in items:
            target.add(_key(item))

    def load_frozenset(self) -> None:
        items = self.pop_mark()  # which brings back the stack below
        self.append(frozenset(_set(items)))

    dispatch |= {
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_reduce,
        pickle.NEWOBJ_EX[0]: load_newobj_ex,
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.DICT[0]: load_dict,
        pickle.ADDITEMS[0]: load_additems,
        pickle.FROZENSET[0]: load_frozenset,
    }
