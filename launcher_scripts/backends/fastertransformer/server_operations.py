"""Operations that the gateway has done by a server, asked for by a parameter of a request."""

from __future__ import annotations

import json
import os
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import triton_python_backend_utils as pb_utils

from launcher_scripts.backends.fastertransformer.answer import send_last
from launcher_scripts.common.errors import CheckpointError, ConfigError, LauncherError, problem
from launcher_scripts.contract.requests import OPERATION_PARAMETER
from launcher_scripts.engine.engine import Engine
from launcher_scripts.engine.swap import DRAIN_SECONDS, MODES, WeightSwaps
from launcher_scripts.models.repository import served_models

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
        self._model = model
        self._is_closed = os.environ.get(CLOSED_VARIABLE) == "1"
        self._table: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "swap": self._swap,
            "weights": lambda _: self.weights(),
        }

    def begin(self, operation: Mapping[str, Any], sender: Any) -> None:
        """Do it, and reply through the sender."""
        threading.Thread(
            target=self._run, args=(operation, sender), name="operation", daemon=True
        ).start()

    def weights(self) -> dict[str, Any]:
        """Return the version and the digests of the weights that are served."""
        digests = self.swaps.digests
        return {"version": self.swaps.version, "digests": digests and digests.values()}

    def _run(self, operation: Mapping[str, Any], sender: Any) -> None:
        try:
            function = self._table.get(str(operation.get("operation")))
            if function is None:
                message = problem("unknown operation", got=operation, choices=self._table)
                raise ConfigError(message)
            reply = function(operation)
        except LauncherError as error:
            reply = {"error": str(error), "kind": type(error).__name__}
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}", "kind": "InternalError"}
        numbers = torch.tensor(list(json.dumps(reply).encode()), dtype=torch.int32)[None, None]
        tensor = pb_utils.Tensor.from_dlpack("news", torch.utils.dlpack.to_dlpack(numbers))
        send_last(sender, pb_utils.InferenceResponse([tensor]))

    def _swap(self, operation: Mapping[str, Any]) -> dict[str, Any]:
        if not self._is_closed:
            message = "weights are exchanged only in a server that is closed to strangers"
            raise ConfigError(problem(message, change="deploy.gateway.api_keys"))
        mode = operation.get("mode", MODES[0])
        if mode not in MODES:
            raise ConfigError(problem("unknown mode", got=mode, choices=MODES))
        seconds = float(operation.get("drain_timeout", DRAIN_SECONDS))
        folder = export_folder(Path(str(operation.get("checkpoint", ""))), self._model)
        result = self.swaps.swap(folder, mode, seconds)
        print(f"model {self._model}: the weights are those of {folder}", flush=True)
        return result.values()


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
        names = [item.name for item in models]
        raise CheckpointError(
            problem(message, got=names or "nothing of the kind", change="the path")
        )
    return named[0].checkpoint_dir
