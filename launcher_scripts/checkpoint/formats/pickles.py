"""A pickle reader that can only build plain data and tensors.

A pickle names the callables that it wants called. Here a name is never imported and never called:

- a name in a table stands for one of this project's own inert classes and functions;
- a name that can only be an attack (`os.system`) is an error;
- any other name, and whatever the pickle makes with it, is an Opaque.

An Opaque harms nobody as long as no tensor and no setting depends on it. Readers therefore pass
the values that they need to `check_readable`.

Python's reader in Python is the base: its memo is a dictionary, where the one in C has as many
places as the pickle says.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from launcher_scripts.common.errors import CheckpointError

Globals = Mapping[tuple[str, str], Any]

# Modules, and parts of modules, that a pickle only names to run something on the reader's machine.
_ATTACK_MODULES = frozenset(
    {
        *("_posixsubprocess", "bdb", "code", "commands", "ctypes", "marshal", "pdb", "pty"),
        *("runpy", "subprocess", "timeit", "webbrowser"),
    }
)
_PROCESS_CALLS = (
    *("_exit", "chmod", "chown", "execl", "execle", "execlp", "execv", "execve", "execvp"),
    *("execvpe", "fork", "forkpty", "kill", "killpg", "link", "open", "popen", "popen2", "popen3"),
    *("popen4", "posix_spawn", "posix_spawnp", "putenv", "remove", "removedirs", "rename"),
    *("renames", "replace", "rmdir", "spawnl", "spawnle", "spawnlp", "spawnlpe", "spawnv"),
    *("spawnve", "spawnvp", "spawnvpe", "startfile", "symlink", "system", "truncate", "unlink"),
)
_BUILTIN_CALLS = (
    *("__import__", "apply", "breakpoint", "compile", "delattr", "eval", "exec", "execfile"),
    *("globals", "input", "locals", "open", "setattr", "vars"),
)
_ATTACK_NAMES = frozenset(
    {
        *(f"{module}.{name}" for module in ("os", "posix", "nt") for name in _PROCESS_CALLS),
        *(f"{module}.{name}" for module in ("builtins", "__builtin__") for name in _BUILTIN_CALLS),
        *("_io.FileIO", "_io.open", "io.FileIO", "io.open", "codecs.open"),
        *("_pickle.load", "_pickle.loads", "pickle.load", "pickle.loads", "cloudpickle.loads"),
        *("dill.loads", "joblib.load", "numpy.load", "torch.load", "hub.load"),
        *("asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell", "cProfile.run"),
        *("importlib.__import__", "importlib.import_module", "profile.run", "pip.main"),
        *("shutil.copy", "shutil.copyfile", "shutil.copytree", "shutil.move", "shutil.rmtree"),
        *("signal.alarm", "signal.pthread_kill", "signal.raise_signal", "sys.exit"),
        *("requests.get", "requests.post", "socket.create_connection", "socket.socket"),
        *("http.client", "httplib.HTTPConnection", "urllib.request", "urllib2.urlopen"),
    }
)
_MAX_NAME = 200  # characters, in errors


class Token:
    """Stands for a name that is in a table.  meaning: the table's value of it"""

    __slots__ = ("meaning", "name")

    def __init__(self, meaning: Any, name: str) -> None:
        self.meaning = meaning
        self.name = name

    def __repr__(self) -> str:
        return self.name


def meaning(value: Any) -> Any:
    """The table's value if `value` is a token, else `value`."""
    return value.meaning if isinstance(value, Token) else value


class Opaque:
    """Stands for a name that nothing here reads, and for every object that is made with it.

    It can be called, filled and given a state like any object, and keeps nothing of that.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<an object of {self.name}>"

    def __call__(self, *_: object, **__: object) -> Opaque:
        return Opaque(self.name)

    def __setstate__(self, _: object) -> None:
        pass

    def __setitem__(self, _: object, __: object) -> None:
        pass

    def append(self, _: object) -> None:
        pass

    def extend(self, _: object) -> None:
        pass

    def add(self, _: object) -> None:
        pass


class PickledObject:
    """Stands for a data object: its attributes are read like a mapping's keys."""

    def __init__(self, *_: object, **__: object) -> None:
        self.state: dict[str, Any] = {}

    def __setstate__(self, state: object) -> None:
        self.state = state if isinstance(state, dict) else {}

    def __getitem__(self, name: str) -> Any:
        return self.state[name]

    def get(self, name: str) -> Any:
        return self.state.get(name)


def unreadable(value: Any) -> str | None:
    """The name of a class in a setting's value that nothing here reads; None for plain values."""
    if isinstance(value, (Opaque, Token)):
        return value.name
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return next((name for name in map(unreadable, value) if name is not None), None)
    return None if value is None or isinstance(value, _PLAIN) else type(value).__name__


_PLAIN = (str, bytes, int, float)


def check_readable(value: Any, origin: str) -> None:
    """Raise CheckpointError if a value that is needed is an object that nothing here reads."""
    if isinstance(value, (Opaque, Token)):
        raise CheckpointError(
            f"{origin} is an object of {value.name}, which is not read here; it was not run"
        )


class _NumpyType(Opaque):
    """numpy.dtype of plain numbers."""

    __slots__ = ("dtype",)

    def __init__(self, code: object, *_: object) -> None:
        super().__init__("numpy.dtype")
        self.dtype = np.dtype(code) if code in _NUMPY_CODES else None

    def __setstate__(self, state: object) -> None:
        big = isinstance(state, tuple) and state[1:2] == (">",)
        if big and self.dtype is not None:
            self.dtype = self.dtype.newbyteorder(">")


_NUMPY_CODES = ("b1", *(f"{kind}{size}" for kind in "iu" for size in "1248"), "f2", "f4", "f8")


def _numpy_scalar(dtype: Any, data: Any = b"") -> Any:
    kind = dtype.dtype if isinstance(dtype, _NumpyType) else None
    if kind is None or not isinstance(data, bytes) or len(data) != kind.itemsize:
        return Opaque("numpy.generic")
    return np.frombuffer(data, kind)[0].item()


def _encoded(text: Any, encoding: Any = None) -> Any:
    """_codecs.encode, as older protocols write bytes."""
    if isinstance(text, str) and encoding == "latin1":
        return text.encode("latin1")
    return Opaque("_codecs.encode")


def _reconstructed(kind: Any, *_: object) -> Any:
    """copyreg._reconstructor, as the protocols before 2 make an object."""
    value = meaning(kind)
    return value() if value is not kind and callable(value) else Opaque(getattr(kind, "name", "?"))


def _sequence(items: Any = (), *_: object) -> list[Any]:
    if not isinstance(items, (list, tuple, set, frozenset)):
        raise TypeError(f"a list of {type(items).__name__}")
    return list(items)


def _set(items: Any = ()) -> set[Any]:
    return {_key(item) for item in _sequence(items)}


def _mapping(items: Any = ()) -> OrderedDict[Any, Any]:
    pairs = items.items() if isinstance(items, dict) else _sequence(items)
    return OrderedDict((_key(key), value) for key, value in pairs)


def _default_mapping(_: object = None, items: Any = ()) -> OrderedDict[Any, Any]:
    """collections.defaultdict, without its factory."""
    return _mapping(items)


_BUILTINS = {"dict": _mapping, "list": _sequence, "set": _set, "int": int}
PLAIN_GLOBALS: Globals = {
    ("collections", "OrderedDict"): _mapping,
    ("collections", "Counter"): _mapping,
    ("collections", "defaultdict"): _default_mapping,
    ("collections", "deque"): _sequence,
    ("_codecs", "encode"): _encoded,
    ("numpy", "dtype"): _NumpyType,
    **{
        (module, name): kind
        for module in ("builtins", "__builtin__")
        for name, kind in _BUILTINS.items()
    },
    **{(f"numpy.{core}.multiarray", "scalar"): _numpy_scalar for core in ("core", "_core")},
    **{(module, "_reconstructor"): _reconstructed for module in ("copyreg", "copy_reg")},
}


def load_pickle(
    data: bytes,
    origin: str,
    allowed: Globals,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Unpickle `data`; globals other than PLAIN_GLOBALS and `allowed` become Opaque.

    origin:     what the data is, for errors
    allowed:    (module, name) -> what stands for it
    persistent: resolves persistent ids (torch's storages)

    Raises CheckpointError for a name that is an attack and for damaged data.
    """
    try:
        result = _Reader(data, origin, allowed, persistent).load()
        _check_extent(result, _EXPANSION * len(data))
        return result
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{origin} is damaged: {type(error).__name__}: {error}") from error


# Shared parts written out may take this many times the pickle's bytes; nested as deep as this.
_EXPANSION = 64
_DEPTH = 100
_KEY_PARTS = 100
_PLAIN_KEYS = (str, bytes, int, float, type(None), Token, Opaque, PickledObject)


def _key(key: Any) -> Any:
    """A dictionary's key: the hash of a large one would take long, that of a deep one the stack."""
    parts = [key]
    for part in parts:
        if isinstance(part, (tuple, frozenset)) and len(parts) < _KEY_PARTS:
            parts += part
        elif not isinstance(part, _PLAIN_KEYS):
            raise TypeError(f"a key of {type(part).__name__}")
    return key


def _check_extent(extent: Any, limit: int) -> None:
    """Refuse values that contain themselves, or each other so often that no reader would end."""
    sizes: dict[int, int] = {}

    def size(value: Any, depth: int) -> int:
        if isinstance(value, PickledObject):
            value = value.state
        if not isinstance(value, (dict, list, tuple, set, frozenset)):
            return 1
        if id(value) not in sizes:
            if depth > _DEPTH:
                raise ValueError("nested too deeply")
            sizes[id(value)] = limit + 1  # of one that contains itself
            parts = [*value, *value.values()] if isinstance(value, dict) else value
            sizes[id(value)] = 1 + sum(size(part, depth + 1) for part in parts)
        if sizes[id(value)] > limit:
            raise ValueError("the same parts are repeated without end")
        return sizes[id(value)]

    size(extent, 0)


def _is_attack(path: str) -> bool:
    """True for a name below _ATTACK_MODULES or _ATTACK_NAMES, also one that a module imported."""
    parts = path.split(".")
    pairs = {".".join(pair) for pair in pairwise(parts)}
    return parts[0] in _ATTACK_MODULES or not pairs.isdisjoint(_ATTACK_NAMES)


class _Reader(pickle._Unpickler):
    """The opcodes that checkpoints need; all others are not part of `dispatch`."""

    # What the base class keeps while it loads.
    stack: list[Any]
    append: Callable[[Any], None]
    read: Callable[[int], bytes]
    pop_mark: Callable[[], list[Any]]

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        number: action
        for number, action in pickle._Unpickler.dispatch.items()
        if bytes([number])
        not in (
            *(pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.PERSID),
            *(pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
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

    def find_class(self, module: str, name: str) -> Token | Opaque:
        path = f"{module}.{name}"
        for table in (PLAIN_GLOBALS, self._allowed):
            if (module, name) in table:
                return Token(table[module, name], path)
        if _is_attack(path):
            raise CheckpointError(
                f"{self._origin} names {path[:_MAX_NAME]}, which only an attack needs; it was not "
                "run, and the checkpoint is refused"
            )
        return Opaque(path[:_MAX_NAME])

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise CheckpointError(f"{self._origin} refers to data outside of it")
        return self._persistent(pid)

    def _call(self, called: Any, args: Any, named: Any = None) -> None:
        """Call a token, or an opaque name or object."""
        if (
            not isinstance(called, (Token, Opaque))
            or not callable(meaning(called))
            or not isinstance(args, tuple)
        ):
            raise TypeError(f"a call of {type(called).__name__}")
        self.append(meaning(called)(*args, **(named or {})))

    def load_reduce(self) -> None:
        args = self.stack.pop()
        self._call(self.stack.pop(), args)

    def load_bytearray8(self) -> None:
        (size,) = struct.unpack("<Q", self.read(8))
        self.append(bytearray(self.read(size)))  # the base class would allocate `size` first

    def load_newobj_ex(self) -> None:
        named, args = self.stack.pop(), self.stack.pop()
        self._call(self.stack.pop(), args, named)

    def load_build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, (Opaque, PickledObject)):
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
        if not isinstance(target, (dict, Opaque)):
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
        if not isinstance(target, (set, Opaque)):
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
        pickle.BYTEARRAY8[0]: load_bytearray8,
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.DICT[0]: load_dict,
        pickle.ADDITEMS[0]: load_additems,
        pickle.FROZENSET[0]: load_frozenset,
    }
