"""Send the tensors of a safetensors file, or of a trainer, to a running server of the same model.

    python3 -m launcher_scripts.clients refit SOCKET model.safetensors --version step-1200

SOCKET is what POST /admin/refit_socket of the gateway names, on the server's node. In a trainer:

    with RefitClient(path) as client:
        client.send(model.state_dict(), version="step-1200")

The tensors have their names in transformers, and all of the model's must come. The protocol: the
client sends one safetensors file (the header's length as eight bytes, little-endian, the header,
the values), whose metadata may say version, mode and drain_timeout. The server answers with a JSON
object behind its length, in eight bytes, too: `version`, `digests`, ... or `error` and `kind`,
after which the connection ends. Else the client may send the next file.

Tensors on GPUs are not copied to the host: the metadata says where they are (`HANDLES` in
contract/requests.py), no values follow the header, and the server's ranks read them there.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import socket
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from launcher_scripts.clients.arguments import run_client
from launcher_scripts.common.command_line import CommandParser
from launcher_scripts.common.errors import ConfigError, ServerError, problem
from launcher_scripts.contract.requests import EXCHANGE_MODES, HANDLES

LENGTH = struct.Struct("<Q")
MAX_REPLY = 1 << 20
# Of numpy and torch -> of safetensors.
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class RefitClient:
    """A connection to the socket of a server; a context manager.

    timeout: seconds that the server may take to answer
    """

    def __init__(self, path: Path | str, timeout: float = 600.0) -> None:
        """Raises ServerError where nobody listens."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            self._socket.close()
            raise ServerError(f"no server listens at {path}: {error}") from error

    def __enter__(self) -> RefitClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(
        self,
        tensors: Mapping[str, Any],
        version: str = "",
        mode: str = "mixed",
        drain_timeout: float = 30.0,
    ) -> dict[str, Any]:
        """Serve these tensors; returns the server's answer once it does.

        tensors: of numpy or torch, on any device;  mode: of requests that have begun
        Raises ServerError with the reason, and then the server serves what it served before.
        """
        entries: dict[str, Any] = {"__metadata__": _metadata(version, mode, drain_timeout)}
        at = 0
        for name, tensor in tensors.items():
            size = int(tensor.nbytes)
            dtype = DTYPES.get(str(tensor.dtype).removeprefix("torch."))
            if dtype is None:
                message = f"{name} has a type that is not sent"
                raise ConfigError(problem(message, got=str(tensor.dtype), choices=DTYPES))
            offsets = [at, at + size]
            entries[name] = {"dtype": dtype, "shape": [*tensor.shape], "data_offsets": offsets}
            at += size
        if not tensors or not all(getattr(item, "is_cuda", False) for item in tensors.values()):
            return self._exchange(entries, map(_bytes_of, tensors.values()))
        shared = {name: item.detach().contiguous() for name, item in tensors.items()}
        entries["__metadata__"][HANDLES] = json.dumps(_handles(shared))
        return self._exchange(entries, ())

    def send_file(self, path: Path, version: str = "", mode: str = "mixed") -> dict[str, Any]:
        """Serve the tensors of a safetensors file; see `send`. Raises ConfigError for another."""
        try:
            opened = path.open("rb")
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        with opened as file:
            entries = _header_of(file)
            entries["__metadata__"] = _metadata(version, mode, 30.0)
            start = file.tell()
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            with content, memoryview(content) as full, full[start:] as values:
                return self._exchange(entries, [values])

    def _exchange(self, entries: Mapping[str, Any], values: Iterable[Any]) -> dict[str, Any]:
        header = json.dumps(entries).encode()
        try:
            self._socket.sendall(LENGTH.pack(len(header)) + header)
            for value in values:
                self._socket.sendall(value)
        except BrokenPipeError:
            pass  # the server's answer says why it reads no more
        except OSError as error:
            raise ServerError(f"the server ended before it had all tensors: {error}") from error
        try:
            (length,) = LENGTH.unpack(self._receive(LENGTH.size))
            reply: dict[str, Any] = json.loads(self._receive(min(length, MAX_REPLY)))
        except (OSError, ValueError) as error:
            raise ServerError(f"the server gave no answer: {error}") from error
        if "error" in reply:
            raise ServerError(f"the weights were not exchanged: {reply['error']}")
        return reply

    def _receive(self, count: int) -> bytes:
        result = b""
        while len(result) < count:
            if not (piece := self._socket.recv(count - len(result))):
                raise OSError("the connection has ended")
            result += piece
        return result


def _metadata(version: str, mode: str, drain_timeout: float) -> dict[str, str]:
    return {"version": version, "mode": mode, "drain_timeout": str(drain_timeout)}


def _header_of(file: BinaryIO) -> dict[str, Any]:
    """Read the header of a safetensors file. Raises ConfigError."""
    try:
        (length,) = LENGTH.unpack(file.read(LENGTH.size))
        entries = json.loads(file.read(length))
    except (struct.error, ValueError, MemoryError, OverflowError) as error:
        reason = str(error) or "its first bytes are no length of a header"
        raise ConfigError(f"{file.name} is no safetensors file: {reason}") from error
    if not isinstance(entries, dict):
        raise ConfigError(f"{file.name} is no safetensors file")
    return entries


def _bytes_of(tensor: Any) -> Any:
    """The values of a tensor of numpy or torch in row-major order, without a copy on the CPU."""
    if not hasattr(tensor, "data_ptr"):
        return memoryview(tensor if tensor.flags.c_contiguous else tensor.copy("C")).cast("B")
    tensor = tensor.detach().cpu().contiguous()
    values = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    values.tensor = tensor  # which has the memory
    return memoryview(values).cast("B")


def _handles(tensors: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return what other processes open the memory of contiguous CUDA tensors by, see HANDLES."""
    cuda = sys.modules["torch"].cuda
    result, uuids = {}, {}
    for device in {tensor.device for tensor in tensors.values()}:
        cuda.synchronize(device)
        uuids[device] = str(cuda.get_device_properties(device).uuid)
    for name, tensor in tensors.items():
        shared = tensor.untyped_storage()._share_cuda_()
        storage = [item.hex() if isinstance(item, bytes) else item for item in shared[1:]]
        first = tensor.storage_offset() * tensor.element_size()
        result[name] = [uuids[tensor.device], *storage, first, int(tensor.nbytes)]
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = CommandParser(prog="refit", description=str(__doc__).partition("\n")[0])
    parser.add_argument("socket", type=Path, help="as POST /admin/refit_socket names it")
    parser.add_argument("file", type=Path, help="a safetensors file with all tensors of the model")
    parser.add_argument("--version", default="", help="the name of these weights in answers")
    parser.add_argument("--mode", default="mixed", choices=EXCHANGE_MODES)
    return run_client(send_checkpoint, parser.parse_args(argv))


def send_checkpoint(flags: argparse.Namespace) -> None:
    """Send a file and print the result."""
    with RefitClient(flags.socket) as client:
        reply = client.send_file(flags.file, flags.version, flags.mode)
    digests = reply["digests"]
    print(
        f"{digests['system_fingerprint']}, weights_version {digests['weights_version']}: "
        f"{reply['prepare_seconds']:.2f} s to prepare, a pause of {reply['pause_seconds']:.3f} s, "
        f"{reply['mixed_rows']} rows went on"
    )
