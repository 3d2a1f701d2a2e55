"""Objects of any class in pickles: inert, refused only if a weight or a setting is one."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import ipaddress
import operator
import pathlib
import pickle
import re
import signal
import types
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from launcher_scripts.checkpoint.formats import pickles, torch_file
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.sources import huggingface_peft, megatron
from launcher_scripts.common.errors import CheckpointError
from tests.checkpoint.exporting import export_folder, refused_export, weight_bytes
from tests.checkpoint.megatron_maker import Maker
from tests.checkpoint.test_torch_file import region_of, saved
from tests.checkpoint.tiny_models import DECODERS
from tests.checkpoint_maker import Variant, make_nemo, small_config


class Backend(enum.Enum):
    FLASH = 1


class Scope(enum.IntFlag):
    ATTENTION = 1
    MLP = 2


class Recipe(str, enum.Enum):
    DELAYED = "delayed"


@dataclasses.dataclass(frozen=True, slots=True)
class Overlap:
    size: int
    names: tuple[str, ...] = ("a", "b")


class Layout(NamedTuple):
    rows: int
    columns: int


class Words(dict[str, int]):
    pass


class Pieces(list[int]):
    pass


class Members(set[int]):
    pass


class Name(str):
    pass


class Stateful:
    calls = 0

    def __init__(self) -> None:
        self.values = [1, {"a": self.__class__}]

    def __getstate__(self) -> Any:
        return ("state", self.values)

    def __setstate__(self, state: Any) -> None:
        Stateful.calls += 1


class Named:
    """Needs NEWOBJ_EX."""

    def __new__(cls, *, size: int) -> Named:  # noqa: ARG004
        return super().__new__(cls)

    def __getnewargs_ex__(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (), {"size": 3}


class Reduced:
    """Has a state, items of a list and items of a dictionary."""

    def __reduce__(self) -> Any:
        return (Reduced, (), {"a": 1}, iter([1, 2]), iter([("k", "v")]))

    def append(self, _: object) -> None: ...

    def __setitem__(self, _: object, __: object) -> None: ...


def default() -> int:
    return 0


VALUES: dict[str, Any] = {
    "exit_signal": signal.SIGTERM,
    "backend": Backend.FLASH,
    "scope": Scope.ATTENTION | Scope.MLP,
    "scopes": [Scope.MLP, Recipe.DELAYED],
    "recipe": Recipe.DELAYED,
    "dataclass": Overlap(2),
    "named_tuple": Layout(1, 2),
    "partial": functools.partial(torch.nn.init.normal_, std=0.02),
    "function": torch.nn.functional.gelu,
    "builtin": len,
    "class": Stateful,
    "method": Path("a").exists,
    "getter": operator.itemgetter(1),
    "dtype": torch.bfloat16,
    "dtypes": {"a": torch.float8_e5m2, torch.float16: 1},
    "device": torch.device("cuda", 0),
    "size": torch.Size([1, 2]),
    "numpy_type": np.dtype("<f4"),
    "numpy_class": np.float32,
    "numpy_number": np.float64(1.5),
    "numpy_array": np.arange(4.0),
    "numpy_state": np.random.RandomState(1).get_state(),
    "numpy_generator": np.random.default_rng(1),
    "path": pathlib.PurePosixPath("/a/b"),
    "paths": (Path("/a"), pathlib.PureWindowsPath("c:/b")),
    "datetime": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
    "timedelta": datetime.timedelta(minutes=20),
    "decimal": decimal.Decimal("1.5"),
    "uuid": uuid.UUID(int=5),
    "address": ipaddress.ip_address("127.0.0.1"),
    "pattern": re.compile("a+"),
    "error": ValueError("text"),
    "omegaconf": OmegaConf.create({"a": {"b": [1, 2]}, "c": "${a.b}"}),
    "ordered": collections.OrderedDict(a=1),
    "counter": collections.Counter("abc"),
    "deque": collections.deque([1, 2], maxlen=3),
    "default": collections.defaultdict(default, {"a": 1}),
    "chain": collections.ChainMap({"a": 1}, {"b": 2}),
    "words": Words(a=1),
    "pieces": Pieces([1, 2]),
    "members": Members({1, 2}),
    "name": Name("text"),
    "range": range(3),
    "slice": slice(1, 2),
    "set": {1, "a"},
    "sets": {frozenset({1}), frozenset()},
    "bytes": b"\xff\0",
    "bytearray": bytearray(b"ab"),
    "complex": 1 + 2j,
    "ellipsis": ...,
    "not_implemented": NotImplemented,
    "type": int,
    "none_type": type(None),
    "namespace": argparse.Namespace(a=Backend.FLASH),
    "simple": types.SimpleNamespace(a=1),
    "stateful": Stateful(),
    "named": Named(size=3),
    "reduced": Reduced(),
    "module": torch.nn.Linear(2, 2),
    "generator_state": torch.Generator().get_state(),
    "sparse": torch.eye(2).to_sparse(),
    "complex_tensor": torch.zeros(2, dtype=torch.complex64),
    "fp8_tensor": torch.ones(2).to(torch.float8_e5m2),
    "optimizer": torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]).state_dict(),
}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_namespace_holds_values_of_any_class(protocol: int) -> None:
    plain = {name: value for name, value in VALUES.items() if "tensor" not in name}
    data = pickle.dumps(argparse.Namespace(before=1, **plain, after=[2]), protocol)
    loaded = pickles.load_pickle(data, "file", megatron.NAMESPACES)
    assert isinstance(loaded, megatron.Namespace)
    assert loaded.state.keys() == {"before", *plain, "after"}
    assert (loaded["before"], loaded["after"]) == (1, [2])
    assert loaded["numpy_number"] == 1.5
    assert loaded["bytes"] == b"\xff\0"
    assert loaded["set"] == {1, "a"}
    assert loaded["counter"] == {"a": 1, "b": 1, "c": 1}
    assert loaded["default"] == {"a": 1}
    assert "Backend" in str(loaded["backend"])
    assert pickles.unreadable(loaded["scopes"]) is not None


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_megatrons_arguments_hold_values_of_any_class(tmp_path: Path, zipped: bool) -> None:
    plain = export_folder(Maker().write(tmp_path / "plain"), tmp_path / "a", 2)
    source = Maker().write(tmp_path / "source")
    for path in source.rglob("*.pt"):
        loaded = torch.load(path, weights_only=False)
        for name, value in VALUES.items():
            # In the older form the size of a storage follows from its type.
            if zipped or name not in ("complex_tensor", "fp8_tensor"):
                setattr(loaded["args"], name, value)
        torch.save(loaded, path, _use_new_zipfile_serialization=zipped)
    calls = Stateful.calls
    folder = export_folder(source, tmp_path / "b", 2)
    assert Stateful.calls == calls
    assert weight_bytes(folder) == weight_bytes(plain)
    lines = (folder / "args.txt").read_text().splitlines()
    assert "num_layers:4" in lines and "numpy_number:1.5" in lines
    assert not any(line.startswith("exit_signal") for line in lines)


@pytest.mark.parametrize("kind", [dict, types.SimpleNamespace])
def test_arguments_of_another_plain_class(tmp_path: Path, kind: Any) -> None:
    source = Maker(args={"layernorm_epsilon": 1e-4}).write(tmp_path / "source")
    plain = export_folder(source, tmp_path / "a")
    path = next(source.rglob("*.pt"))
    loaded = torch.load(path, weights_only=False)
    torch.save(loaded | {"args": kind(**vars(loaded["args"]))}, path)
    folder = export_folder(source, tmp_path / "b")
    assert (folder / "config.ini").read_text() == (plain / "config.ini").read_text()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"hidden_size": Backend.FLASH}, r"hidden_size depends on .*\.Backend, .* not read here"),
        ({"swiglu": Recipe.DELAYED}, r"swiglu depends on .*\.Recipe"),
        ({"window_size": (Scope.MLP, 0)}, r"window_size depends on .*\.Scope"),
        ({"logit_softcapping": Backend.FLASH}, r"logit_softcapping .*\.Backend"),
    ],
)
def test_a_setting_that_is_read_must_be_plain(
    tmp_path: Path, args: dict[str, Any], words: str
) -> None:
    refused_export(Maker(args=args).write(tmp_path / "source"), tmp_path, words)


def test_a_setting_may_be_a_number_of_numpy(tmp_path: Path) -> None:
    plain = export_folder(Maker().write(tmp_path / "plain"), tmp_path / "a")
    source = Maker(args={"num_layers": np.int64(4), "hidden_size": np.int32(24)})
    folder = export_folder(source.write(tmp_path / "source"), tmp_path / "b")
    assert weight_bytes(folder) == weight_bytes(plain)


class Arguments(argparse.Namespace):
    pass


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"args": Arguments(a=1)}, r"args of .* is an object of .*\.Arguments"),
        ({"model": torch.nn.Linear(1, 1)}, r"model of .* is an object of torch\.nn\..*Linear"),
        ({"model": Words(a=1)}, r"model of .* is an object of .*\.Words"),
    ],
)
def test_what_weights_and_settings_depend_on_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    source = Maker().write(tmp_path / "source")
    path = next(source.rglob("*.pt"))
    torch.save(torch.load(path, weights_only=False) | change, path)
    refused_export(source, tmp_path, words)


def test_tensors_with_attributes_and_parameters_are_tensors(tmp_path: Path) -> None:
    values = torch.arange(6.0).view(2, 3)
    marked, parameter = values.clone(), torch.nn.Parameter(values)
    marked.partition_dim = 0
    parameter.sequence_parallel = Backend.FLASH
    fp8 = values.to(torch.float8_e4m3fn)
    state = {"a": marked, "b": parameter, "c": fp8}
    loaded = torch_file.load_torch_file(region_of(saved(state), tmp_path / "f"), "file")
    np.testing.assert_array_equal(loaded["a"], values)
    np.testing.assert_array_equal(loaded["b"], values)
    np.testing.assert_array_equal(loaded["c"].view("u1"), fp8.view(torch.uint8))


SPARSE = torch.eye(2).to_sparse()


def test_a_weight_of_another_class_is_refused_by_name(tmp_path: Path) -> None:
    """Hugging Face, NeMo and Lightning skip objects, but not one in a weight's place."""
    DECODERS["gpt2"].save(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    state = load_file(file)
    file.unlink()
    weights = tmp_path / "hf" / "pytorch_model.bin"
    torch.save(state | {"trainer": Stateful(), "h.0._extra_state": VALUES["module"]}, weights)
    export_folder(tmp_path / "hf", tmp_path / "a")
    name = next(name for name in state if name.endswith("c_fc.bias"))
    torch.save(state | {name: SPARSE}, weights)
    words = rf"{re.escape(name)} of .* is an object of torch\._utils\._rebuild_sparse_tensor"
    refused_export(tmp_path / "hf", tmp_path, words)


def test_a_nemo_folder_skips_objects_but_not_in_a_weights_place(tmp_path: Path) -> None:
    make_nemo(tmp_path / "source", small_config(), Variant(container="folder"))
    plain = export_folder(tmp_path / "source", tmp_path / "a")
    path = next((tmp_path / "source").rglob("*.ckpt"))
    state = torch.load(path, weights_only=True)
    torch.save(state | {"callbacks": VALUES["omegaconf"]}, path)
    assert weight_bytes(export_folder(tmp_path / "source", tmp_path / "b")) == weight_bytes(plain)
    torch.save(state | {next(iter(state)): SPARSE}, path)
    refused_export(
        tmp_path / "source", tmp_path, "is an object of torch._utils._rebuild_sparse_tensor"
    )


class Entry(TensorStorageMetadata):
    pass


def test_a_distributed_checkpoint_may_describe_more_than_its_tensors(tmp_path: Path) -> None:
    make_nemo(tmp_path / "source", small_config(), Variant("torch_dist", container="folder"))
    plain = export_folder(tmp_path / "source", tmp_path / "a")
    path = next((tmp_path / "source").rglob(".metadata"))
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = {name: VALUES[name] for name in ("exit_signal", "dataclass", "named")}
    path.write_bytes(pickle.dumps(metadata))
    assert weight_bytes(export_folder(tmp_path / "source", tmp_path / "b")) == weight_bytes(plain)
    name, entry = next(iter(metadata.state_dict_metadata.items()))
    metadata.state_dict_metadata[name] = Entry(entry.properties, entry.size, entry.chunks)
    path.write_bytes(pickle.dumps(metadata))
    refused_export(tmp_path / "source", tmp_path, rf"{re.escape(name)} .* an object of .*\.Entry")


def test_an_adapters_weight_of_another_class_is_refused_by_name(tmp_path: Path) -> None:
    name = "base_model.model.h.0.attn.c_attn.lora_A.weight"
    torch.save({name: SPARSE}, tmp_path / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} of .* an object of torch"):
        huggingface_peft._read_tensors(Archive(tmp_path))


ATTACKS = (
    *("os.system", "posix.system", "nt.system", "os.popen", "os.execv", "subprocess.Popen"),
    *("subprocess.check_output", "builtins.eval", "__builtin__.exec", "builtins.__import__"),
    *("importlib.import_module", "runpy.run_path", "pty.spawn", "pickle.loads", "shutil.rmtree"),
    *("webbrowser.open", "torch.load", "torch.hub.load", "ctypes.CDLL", "posixpath.os.system"),
    *("socket.socket", "urllib.request.urlopen", "code.InteractiveInterpreter", "io.open"),
)


@pytest.mark.parametrize("path", ATTACKS)
def test_a_name_that_is_an_attack_is_refused(path: str) -> None:
    module, name = path.rsplit(".", 1)
    for code in (
        f"c{module}\n{name}\n(S'x'\ntR.".encode(),
        b"\x80\x04\x8c%c%b\x8c%c%b\x93." % (len(module), module.encode(), len(name), name.encode()),
    ):
        with pytest.raises(CheckpointError, match=f"names {re.escape(path)}, which only an attack"):
            pickles.load_pickle(code, "file", {})
