"""Operations of a served model besides generating: its weights, its adapters, and its sleep.

The gateway's admin routes ask for them, by a parameter of a request (OPERATION_PARAMETER).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import mmap
import os
import shutil
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import triton_python_backend_utils as pb_utils

from launcher_scripts.backends.fastertransformer.answer import send_last
from launcher_scripts.checkpoint.formats.source_tensor import (
    HEADER_LENGTH,
    MAX_HEADER_BYTES,
    parse_header,
)
from launcher_scripts.checkpoint.sources.huggingface_architectures import CONFIG_NAME
from launcher_scripts.common.errors import (
    CheckpointError,
    ConfigError,
    LauncherError,
    problem,
)
from launcher_scripts.contract.requests import (
    DRAIN_SECONDS,
    EXCHANGE_MODES,
    HANDLES,
    OPERATION_PARAMETER,
    ExchangeMode,
)
from launcher_scripts.engine.engine import Engine
from launcher_scripts.engine.runner.refit_source import REFIT_FILE, SharedTensors
from launcher_scripts.engine.swap import WeightSwaps
from launcher_scripts.models.repository import served_models

SHARED_MEMORY = Path("/dev/shm")
PIECE = 1 << 24  # bytes of one call
COMPARED_BYTES = 1 << 16  # of tensors in other memory: who opens a folder looks for equal ones
SILENCE_SECONDS = 600.0
# Set where nobody reaches the server but those who know the credentials of its start.
CLOSED_VARIABLE = "LAUNCHER_CLOSED_SERVER"


def operation_of(request: Any) -> dict[str, Any] | None:
    """Return the operation that a request asks for; None for a request that generates."""
    parameters = request.parameters()
    if not parameters or OPERATION_PARAMETER not in parameters:
        return None
    operation = json.loads(json.loads(parameters).get(OPERATION_PARAMETER, "null"))
    return operation if isinstance(operation, dict) else None


class ServerOperations:
    """The operations of one model, each on a thread, so that the model serves meanwhile."""

    def __init__(self, model: str, engine: Engine) -> None:
        self.swaps = WeightSwaps(engine)
        self._loras = engine.loras
        self._model = model
        self._is_closed = os.environ.get(CLOSED_VARIABLE) == "1"
        if self._is_closed:  # else nothing is ever exchanged
            self.swaps.warm_up()
        self._table: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "swap": self._swap,
            "load_lora": self._load_lora,
            "unload_lora": self._unload_lora,
            "refit": self._refit,
            "refit_socket": self._refit_socket,
            "sleep": self._sleep,
            "wake": self._wake,
            "weights": lambda _: self.weights(),
        }
        self._socket: RefitSocket | None = None
        self._opening = threading.Lock()

    def begin(self, operation: Mapping[str, Any], sender: Any) -> None:
        """Do it, and reply through the sender."""
        threading.Thread(
            target=self._run, args=(operation, sender), name="operation", daemon=True
        ).start()

    def weights(self) -> dict[str, Any]:
        """Return the version and the digests of the weights that are served."""
        digests = self.swaps.digests
        return {
            "version": self.swaps.version,
            "digests": digests and digests.values(),
            "sleeping": self.swaps.sleeping,
        }

    def _run(self, operation: Mapping[str, Any], sender: Any) -> None:
        try:
            function = self._table.get(str(operation.get("operation")))
            if function is None:
                message = problem("unknown operation", got=operation, choices=self._table)
                raise ConfigError(message)
            reply = function(operation)
        except Exception as error:
            reply = operation_failure(error)
        numbers = torch.tensor(list(json.dumps(reply).encode()), dtype=torch.int32)[None, None]
        tensor = pb_utils.Tensor.from_dlpack("news", torch.utils.dlpack.to_dlpack(numbers))
        send_last(sender, pb_utils.InferenceResponse([tensor]))

    def _swap(self, operation: Mapping[str, Any]) -> dict[str, Any]:
        self._check_closed("weights are exchanged")
        mode, seconds = drain_of(operation, EXCHANGE_MODES[0])
        folder = export_folder(Path(str(operation.get("checkpoint", ""))), self._model)
        result = self.swaps.swap(folder, mode, seconds)
        print(f"model {self._model}: the weights are those of {folder}", flush=True)
        return result.values()

    def _refit(self, operation: Mapping[str, Any]) -> dict[str, Any]:
        self._check_closed("weights are exchanged")
        folder = Path(str(operation.get("folder", "")))
        mode, seconds = drain_of(operation, EXCHANGE_MODES[1])
        version, probe = str(operation.get("version", "")), bool(operation.get("probe", False))
        if not (folder / CONFIG_NAME).is_file():
            message = f"{folder} is not a transformers folder: it has no {CONFIG_NAME}"
            raise CheckpointError(problem(message, change="folder"))
        result = self.swaps.refit(folder, version, mode, seconds, probe=probe)
        print(f"model {self._model}: the weights are those of {folder}", flush=True)
        return result.values()

    def _refit_socket(self, _: Mapping[str, Any]) -> dict[str, Any]:
        self._check_closed("weights are exchanged")
        with self._opening:
            self._socket = self._socket or RefitSocket(self.swaps)
        return {"socket": str(self._socket.path)}

    def _sleep(self, operation: Mapping[str, Any]) -> dict[str, Any]:
        self._check_closed("models sleep")
        self.swaps.sleep(drain_of(operation, EXCHANGE_MODES[0])[1])
        return {"sleeping": self.swaps.sleeping}

    def _wake(self, _: Mapping[str, Any]) -> dict[str, Any]:
        self._check_closed("models wake up")
        self.swaps.wake()
        return {"sleeping": self.swaps.sleeping}

    def _load_lora(self, operation: Mapping[str, Any]) -> dict[str, Any]:
        self._check_closed("adapters are added")
        name, path = str(operation.get("name", "")), Path(str(operation.get("path", "")))
        number = self._loras.load(name, path)
        print(f"model {self._model}: the adapter {name} is that of {path}", flush=True)
        return {"number": number}

    def _unload_lora(self, operation: Mapping[str, Any]) -> dict[str, Any]:
        self._check_closed("adapters are removed")
        self._loras.unload(str(operation.get("name", "")))
        return {}

    def _check_closed(self, action: str) -> None:
        if not self._is_closed:
            message = f"{action} only in a server that is closed to strangers"
            raise ConfigError(problem(message, change="deploy.gateway.api_keys"))


def operation_failure(error: Exception) -> dict[str, Any]:
    """Return what an operation that failed replies."""
    if isinstance(error, LauncherError):
        return {"error": str(error), "kind": type(error).__name__}
    traceback.print_exception(error)
    return {"error": f"{type(error).__name__}: {error}", "kind": "InternalError"}


def export_folder(path: Path, model: str) -> Path:
    """The folder of shards of an export: a model repository, in which the model of this name or
    the only one is meant, or the folder itself. Raises CheckpointError.
    """
    if (path / "config.ini").is_file():
        return path
    models = served_models(path) if path.is_dir() else []
    named = [item for item in models if item.name == model] or models
    if len(named) != 1:
        message = f"{path} is not an export of model {model}: a model repository or its shards"
        got: Any = [item.name for item in models] or "nothing of the kind"
        if not path.exists():
            got = "a path that this node does not have"
        elif not models and (path / CONFIG_NAME).is_file():
            got = "a transformers folder, which POST /admin/refit takes, or stages=[export] exports"
        raise CheckpointError(problem(message, got=got, change="the path"))
    return named[0].checkpoint_dir


def drain_of(operation: Mapping[str, Any], mode: ExchangeMode) -> tuple[ExchangeMode, float]:
    """Return mode and drain_timeout of an operation.  mode: the default.  Raises ConfigError."""
    mode = operation.get("mode") or mode
    if mode not in EXCHANGE_MODES:
        raise ConfigError(problem("unknown mode", got=mode, choices=EXCHANGE_MODES))
    try:
        return mode, float(operation.get("drain_timeout", DRAIN_SECONDS))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"drain_timeout is no number: {error}") from error


class RefitSocket:
    """Weights by their names in transformers, over a socket of this node.

    A client sends one safetensors file, whose metadata may say version, mode and drain_timeout, and
    gets a JSON object behind its length: the values of SwapResult, or error and kind, after which
    the connection ends. Else it may send the next file. What has not come in full changes nothing.
    The file is kept in memory, where the other ranks read it, until it is served.

    path: of the socket, in a folder that this user alone may enter
    """

    def __init__(self, swaps: WeightSwaps) -> None:
        """Raises ConfigError where the model runs on several nodes, and CheckpointError where
        transformers has no class of it, and so no names.
        """
        if swaps.settings.nodes > 1:
            message = "ranks on other nodes do not see the memory behind a socket"
            raise ConfigError(problem(message, change="refit from a folder that all nodes share"))
        self._swaps = swaps
        # The readers of all formats are loaded when they are needed, and not in the first refit.
        from launcher_scripts.checkpoint.huggingface.export import exported_model

        self._config = json.dumps(exported_model(swaps.settings.checkpoint_dir).config)
        base = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
        self._folder = Path(tempfile.mkdtemp(prefix="refit-", dir=base))
        self.path = self._folder / "socket"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self._listener.listen(1)
        atexit.register(shutil.rmtree, self._folder, ignore_errors=True)
        threading.Thread(target=self._serve, name="refit", daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            connection.settimeout(SILENCE_SECONDS)
            with connection, contextlib.suppress(OSError, EOFError):
                is_open = True
                while is_open:
                    is_open = self._answer(connection)

    def _answer(self, connection: socket.socket) -> bool:
        """Take one file, serve it and reply. Return whether the next one may come.

        Raises EOFError where it does not come.
        """
        prefix = bytearray(HEADER_LENGTH.size)
        fill(connection, memoryview(prefix))
        began, memory, folder = time.perf_counter(), None, self._folder / "weights"
        folder.mkdir()
        try:
            metadata = receive_refit(connection, prefix, folder / REFIT_FILE)
            memory = SharedTensors.of(folder)
            if memory is not None:
                memory.write(COMPARED_BYTES)
            (folder / CONFIG_NAME).write_text(self._config)
            mode, seconds = drain_of(metadata, EXCHANGE_MODES[1])
            version = str(metadata.get("version", ""))
            result = self._swaps.refit(folder, version, mode, seconds, memory=memory, began=began)
            reply = {**result.values(), "seconds": time.perf_counter() - began}
        except EOFError:
            raise
        except Exception as error:
            reply = operation_failure(error)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        content = json.dumps(reply).encode()
        connection.sendall(HEADER_LENGTH.pack(len(content)) + content)
        del memory  # open until the client has its reply: each part takes a while to close
        return "error" not in reply


def receive_refit(connection: socket.socket, prefix: bytearray, path: Path) -> dict[str, Any]:
    """Write the safetensors file that comes next; returns its metadata.

    prefix: its first bytes, which have come before
    Raises EOFError where it ends too early, and CheckpointError for what cannot be one.
    """
    (length,) = HEADER_LENGTH.unpack(prefix)
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{length} bytes are too many for the header of a safetensors file")
    header = bytearray(length)
    fill(connection, memoryview(header))
    try:
        entries, metadata = parse_header(bytes(header))
        ends = [entry["data_offsets"][1] for entry in entries.values()]
        if not all(type(end) is int and end >= 0 for end in ends):
            raise ValueError("its tensors end nowhere")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"this is no header of a safetensors file: {error}") from error
    size = len(prefix) + length + max(ends, default=0)
    if size > shutil.disk_usage(path.parent).free:
        raise CheckpointError(f"{path.parent} has no room for the file's {size} bytes")
    with path.open("w+b") as file:
        file.truncate(size)
        with mmap.mmap(file.fileno(), size) as content, memoryview(content) as view:
            start = len(prefix) + length
            view[:start] = prefix + header
            metadata = metadata if isinstance(metadata, dict) else {}
            if HANDLES not in metadata:
                fill(connection, view[start:])
    return metadata


def fill(connection: socket.socket, view: memoryview) -> None:
    """Receive as many bytes. Raises EOFError where the peer ends, or is silent, before."""
    with view:
        at = 0
        while at < len(view):
            try:
                count = connection.recv_into(view[at : at + PIECE])
            except OSError as error:
                raise EOFError from error
            if not count:
                raise EOFError
            at += count
