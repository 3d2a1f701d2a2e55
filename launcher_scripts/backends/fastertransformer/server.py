"""The server of a model: its parameters in config.pbtxt, its nodes and its status file; and the end
of a model's process when its server is gone.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch

from launcher_scripts.common import processes
from launcher_scripts.common.errors import ConfigError, Problems, ServerError, problem
from launcher_scripts.common.files import atomic_write
from launcher_scripts.common.hosts import ATTEMPT_VARIABLE, INTERFACE_VARIABLE, find_node_rank
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.common.processes import (
    process_name,
    signal_when_parent_dies,
    this_environment,
    this_python,
)
from launcher_scripts.common.quantization import kv_cache_dtype_of, quantization_of
from launcher_scripts.contract.contracts import CONTRACTS
from launcher_scripts.engine.core.requests import MAX_BEAMS
from launcher_scripts.engine.engine import EngineSettings
from launcher_scripts.engine.messages.message import RankInfo
from launcher_scripts.engine.ranks.links import (
    ADVICE,
    NodeGroup,
    find_rendezvous,
    rendezvous_folders,
)
from launcher_scripts.engine.ranks.rank_host import POLL_SECONDS, RankHost
from launcher_scripts.models.repository import checkpoint_folder

WHERE = "parameters in config.pbtxt"
SERVER_PARAMETERS = {"EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS"}  # of its Python backend

PARAMETERS = (
    "tensor_para_size",
    "pipeline_para_size",
    "data_type",
    "model_type",
    "model_checkpoint_path",
    "draft_model_checkpoint_path",
    "int8_mode",
    "quantization",
    "kv_cache_dtype",
    "enable_custom_all_reduce",
    "max_loras",
    "max_lora_rank",
    "inter_token_target",
    "enable_prefix_caching",
    "deterministic",
    "deterministic_ranks",
)
# So the guides' sections on several nodes call the pipeline's size.
PIPELINES_OLD_NAME = "layer_para_size"
# The original's guides call these bool, its files say 0 or 1.
FLAGS = ("enable_custom_all_reduce", "enable_prefix_caching", "deterministic")
FLAG_WORDS = {"false": "0", "true": "1"}

# max_batch_size bounds one request; rows of many requests run together whatever it is, and the
# widest beam search fits.
ROWS_IN_FLIGHT = MAX_BEAMS
# Parameter -> its minimum, and its text where it is absent; None: it must be there.
INTEGERS: dict[str, tuple[int, str | None]] = {
    "tensor_para_size": (1, None),
    "pipeline_para_size": (1, "1"),
    "int8_mode": (0, "0"),
    "deterministic_ranks": (1, "1"),
    "max_loras": (0, "0"),
    "max_lora_rank": (1, str(EngineSettings.max_lora_rank)),
    **dict.fromkeys(FLAGS, (0, "0")),
}


def model_type(config: Mapping[str, Any]) -> str:
    """The row of CONTRACTS that config.pbtxt names."""
    return _strings(config).get("model_type", "GPT")


def engine_settings(
    config: Mapping[str, Any], model_dir: Path, version: str, device: str
) -> EngineSettings:
    """Return the engine's settings from config.pbtxt (as Triton's JSON); all wrong values raise one
    ConfigError.

    Parameters without a meaning are named in the server's log: old guides have some (is_half).

    Where the checkpoint is looked for: see checkpoint_folder.
    """
    values = _strings(config)
    if unknown := sorted(values.keys() - set(PARAMETERS) - SERVER_PARAMETERS):
        print(f"{WHERE} without a meaning: {', '.join(unknown)}", file=sys.stderr, flush=True)
    problems = Problems("the model's config.pbtxt")
    numbers = {name: _integer(values, name, *row, problems) for name, row in INTEGERS.items()}
    layers = values.get(PIPELINES_OLD_NAME)
    if layers not in (None, str(numbers["pipeline_para_size"])):
        problems.add(
            f"{PIPELINES_OLD_NAME} is not read, and pipeline_para_size says something else",
            got=layers,
            change=f"pipeline_para_size of the {WHERE}",
        )
    served = model_type(config)
    if served not in CONTRACTS:
        problems.add("unknown model_type", got=served, choices=CONTRACTS, change=WHERE)
    quantization, kv_cache_dtype = None, "auto"
    with problems.collecting():
        quantization = quantization_of(
            numbers["int8_mode"], values.get("quantization"), f"{{}} of the {WHERE}"
        )
    with problems.collecting():
        kv_cache_dtype = kv_cache_dtype_of(values.get("kv_cache_dtype"), f"{{}} of the {WHERE}")
    inter_token_target = _seconds(
        values, "inter_token_target", EngineSettings.inter_token_target, problems
    )
    problems.raise_if_any(ConfigError)
    parallelism = Parallelism(numbers["tensor_para_size"], numbers["pipeline_para_size"])
    version_dir, draft = model_dir / version, values.get("draft_model_checkpoint_path")
    return EngineSettings(
        checkpoint_dir=checkpoint_folder(
            values.get("model_checkpoint_path", ""),
            config.get("default_model_filename", ""),
            version_dir,
            parallelism.tp_size,
            Path.cwd(),
        ),
        draft_checkpoint_dir=checkpoint_folder(
            draft, "", version_dir, parallelism.tp_size, Path.cwd()
        )
        if draft
        else None,
        model_type=served,
        data_type=values.get("data_type", "fp32"),
        parallelism=parallelism,
        device=device,
        max_batch_size=max(ROWS_IN_FLIGHT, int(config.get("max_batch_size", 1))),
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        deterministic_ranks=numbers["deterministic_ranks"],
        max_loras=numbers["max_loras"],
        max_lora_rank=numbers["max_lora_rank"],
        inter_token_target=inter_token_target,
        **{name: bool(numbers[name]) for name in FLAGS},
    )


def _integer(
    values: Mapping[str, str], name: str, minimum: int, default: str | None, problems: Problems
) -> int:
    text = values.get(name, default)
    if name in FLAGS and text is not None:
        text = FLAG_WORDS.get(text.lower(), text)
    if text is None:
        problems.add(f"{name} is missing", change=WHERE)
        return minimum
    if not text.isdecimal() or int(text) < minimum:
        problems.add(f"{name} must be a number of at least {minimum}", got=text, change=WHERE)
        return minimum
    return int(text)


def _seconds(values: Mapping[str, str], name: str, default: float, problems: Problems) -> float:
    """A time of 0 or more."""
    text = values.get(name, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < inf:
        problems.add(f"{name} must be a number of seconds, 0 or more", got=text, change=WHERE)
    return seconds


def _strings(config: Mapping[str, Any]) -> dict[str, str]:
    """The parameters of config.pbtxt that are texts."""
    return {
        name: value["string_value"].strip()
        for name, value in config.get("parameters", {}).items()
        if "string_value" in value
    }


ANSWER_SECONDS = 1.0  # that clients get to be told of a failure
STUB = b"triton_python_backend_stub"  # its arguments: the model's file, a region's name, ...
CLOSING_SECONDS = 2.0  # node 0 unloads its models at the same time, but not in the same moment
LINGER_SECONDS = 5.0  # node 0 tells the reason and ends first


def node_group(env: Mapping[str, str], model: str, model_dir: Path) -> NodeGroup:
    """Return the group through which this server's processes on all nodes find each other for one
    model.

    Raises ServerError where the environment contradicts itself.
    """
    return NodeGroup(
        find_node_rank(env),
        model,
        rendezvous_folders(env, model_dir),
        env.get(INTERFACE_VARIABLE),
        int(env.get(ATTEMPT_VARIABLE, "0")),
    )


def host_ranks(group: NodeGroup, settings: EngineSettings) -> None:
    """Host this node's ranks of the model until its engine on node 0 ends, then end the server.

    Raises ServerError when node 0 is not found in time, or is lost.
    """
    node_rank = group.node_rank
    where = f"node {node_rank.node} of {node_rank.nodes} (started by {node_rank.launcher})"
    print(f"{where}: node 0 serves model {group.model}; this server only hosts ranks", flush=True)
    reason = _find(group, settings).run()
    if reason is not None:
        time.sleep(LINGER_SECONDS)
        raise ServerError(reason)
    time.sleep(CLOSING_SECONDS)
    end_server(signal.SIGTERM)


def end_server_later(error: ServerError) -> None:
    """End a server that lost a rank, with an exit code that is not 0, once clients have been told.

    Triton itself would go on, look ready, and answer every request with an error.
    """
    print(f"ending the server: {error}", file=sys.stderr, flush=True)
    threading.Timer(ANSWER_SECONDS, _kill_server).start()


def end_server(number: int) -> None:
    """Send a signal to the server that this process is a worker of."""
    server = os.getppid()
    if process_name(server) == "tritonserver":
        os.kill(server, number)


def _kill_server() -> None:
    """Kill the server, and remove the shared memory of its workers, which it no longer can."""
    server = os.getppid()
    regions = [
        Path("/dev/shm", arguments[2].decode())
        for folder in Path("/proc").glob(f"{server}/task/*/children")
        for child in folder.read_text().split()
        if (arguments := Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"))[0].endswith(STUB)
    ]
    end_server(signal.SIGKILL)
    for region in regions:
        region.unlink(missing_ok=True)


def _find(group: NodeGroup, settings: EngineSettings) -> RankHost:
    """Join the newest engine of this run that lets us."""
    timeout = settings.start_timeout
    folders = (settings.checkpoint_dir, settings.draft_checkpoint_dir)
    deadline = time.monotonic() + timeout
    last_reason = "nothing"
    while time.monotonic() < deadline:
        for info in find_rendezvous(group.folders, group.node_rank.run).values():
            if info.model != group.model:
                continue
            try:
                return RankHost(group.node_rank, info, folders)
            except (ServerError, OSError) as error:
                last_reason = str(error)
        time.sleep(POLL_SECONDS)
    looked = ", ".join(map(str, group.folders))
    message = f"node 0 of model {group.model} was not found within {timeout:g} s in {looked}"
    raise ServerError(problem(message, got=last_reason, change=ADVICE))


STATUS_DIR_VARIABLE = "LAUNCHER_STATUS_DIR"
DEVICE_VARIABLE = "LAUNCHER_DEVICE"
MAX_WAITING_VARIABLE = "LAUNCHER_MAX_WAITING_ROWS"


class StatusFile:
    """`<folder>/<model>.json`: state loading, ready or failed, with the reason."""

    def __init__(self, model: str) -> None:
        folder = os.environ.get(STATUS_DIR_VARIABLE)
        self._path = Path(folder, f"{model}.json") if folder else None

    @property
    def is_read(self) -> bool:
        """Return whether somebody watches the server through its status files."""
        return self._path is not None

    def write(
        self,
        state: str,
        *,
        reason: str | None = None,
        ranks: Sequence[RankInfo] = (),
        timeline: Sequence[tuple[str, float]] = (),
    ) -> None:
        if self._path is None:
            return
        status = {
            "state": state,
            "reason": reason,
            "ranks": [asdict(rank) for rank in ranks],
            "versions": versions(),
            "timeline": [list(event) for event in timeline],
        }
        atomic_write(self._path, json.dumps(status))


def versions() -> dict[str, str]:
    """Versions of the libraries that the engine runs on."""
    result = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda is not None:
        result["cuda"] = torch.version.cuda
    return result


def started_by(words: Sequence[bytes]) -> int:
    """The server's process id, by the stub's command line: its parent may have gone before now.

    words: triton_python_backend_stub MODEL REGION SIZE GROWTH SERVER ...
    """
    if words[0].endswith(b"triton_python_backend_stub") and len(words) > 5:
        return int(words[5])
    return os.getppid()


class ServerWatch:
    """Ends this process when its server is gone; else its ranks, and those of other nodes, would
    stay with it.
    """

    def __init__(self) -> None:
        server = started_by(Path("/proc/self/cmdline").read_bytes().split(b"\0"))
        self._process = subprocess.Popen(
            [this_python(), "-m", processes.__name__, str(server)],
            env=this_environment(),
            stdin=subprocess.DEVNULL,
            preexec_fn=partial(signal_when_parent_dies, signal.SIGKILL),
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
