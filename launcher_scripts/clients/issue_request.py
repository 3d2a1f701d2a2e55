"""Send the request of a JSON file, and print every output.

The file is one of the FasterTransformer backend's tools/issue_request.py:

    {"config": {"protocol": "http", "url": null, "model_name": null,
                "verbose": false, "stream_api": false},
     "request": [{"name": "input_ids", "data": [[1, 2, 3]], "dtype": "uint32"}, ...]}

Every key of config may be left out; --params goes over the file, flags over both. Without a
model_name it is `fastertransformer`, else the server's only model, of a request with text the
ensemble around it. sequence_id, sequence_start and sequence_end are for a model with sessions; ca,
certificate and key name files for gRPC with TLS. requests/ beside this file holds samples.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.clients.arguments import (
    DEFAULT_ADDRESSES,
    TLS_FILES,
    add_server_flags,
    client_tls,
    run_client,
)
from launcher_scripts.clients.connection import BFLOAT16, NUMPY_TYPES, SequenceStep, Tensors
from launcher_scripts.clients.remote import RemoteServer, find_models
from launcher_scripts.common.command_line import CommandParser
from launcher_scripts.common.errors import ConfigError, Problems, ServerError, problem

DEFAULT_CONFIG = {
    "protocol": "http",
    "url": None,
    "model_name": None,
    "verbose": False,
    "stream_api": False,
    **dict.fromkeys(TLS_FILES),
    "sequence_id": 0,
    "sequence_start": False,
    "sequence_end": False,
}
_INTEGERS = ("int32", "int64", "uint32", "uint64")
_REAL = ("float16", "float32", "float64")
TEXT_INPUTS = {"INPUT_0", "text_input"}  # of these every request to an ensemble has one
# flag -> key of config
FLAGS = {
    "url": "url",
    "protocol": "protocol",
    "model": "model_name",
    "verbose": "verbose",
    **{name: name for name in TLS_FILES},
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="issue_request", description=__doc__.partition("\n")[0])
    add_server_flags(parser, protocol=None)
    parser.add_argument("request_file", metavar="request-file", type=Path)
    parser.add_argument("--params", metavar="JSON", help="override what the file says")
    parser.add_argument(
        "-t",
        "--test",
        action="store_true",
        help="streaming: fail unless every response adds one token to the one before",
    )
    return run_client(issue, parser.parse_args(argv))


def issue(flags: argparse.Namespace) -> None:
    """Send the request that the file, --params and the flags describe, and print the answer."""
    request = merge_mappings({"config": DEFAULT_CONFIG}, read_request(flags.request_file))
    if flags.params is not None:
        request = merge_mappings(request, parse_request(flags.params, "--params"))
    overrides = {key: value for flag, key in FLAGS.items() if (value := getattr(flags, flag))}
    config, tensors = check_request_file(
        merge_mappings(request, {"config": overrides}), str(flags.request_file)
    )
    protocol = "grpc" if config["stream_api"] else config["protocol"]
    address = config["url"] or DEFAULT_ADDRESSES[protocol]
    tls = client_tls({name: config[name] for name in TLS_FILES}, protocol)
    with RemoteServer(address, protocol=protocol, verbose=config["verbose"], tls=tls) as server:
        model = config["model_name"] or model_for(server, tensors)
        tensors = as_declared(server.model_config(model), tensors)
        if config["stream_api"]:
            print_stream(server.stream(model, tensors, step_of(config)), flags.test)
        else:
            answer = server.infer(model, tensors, step=step_of(config))
            for name, array in answer.items():
                print(f"{name}:\n{with_text(array)}\n")


def model_for(server: RemoteServer, tensors: Tensors) -> str:
    """The model that a request without a name is meant for."""
    models = find_models(server, None)
    return models.text_model("ensemble") if TEXT_INPUTS & tensors.keys() else models.name


def as_declared(config: Mapping[str, Any], tensors: Tensors) -> Tensors:
    """The tensors in the types of numbers that the model declares: files may name others.

    config: the model's config.pbtxt, as Triton's JSON
    Raises ConfigError with every tensor whose numbers the declared type does not hold.
    """
    problems = Problems("the request")
    declared = {item["name"]: item["data_type"] for item in config.get("input", [])}
    result = dict(tensors)
    for name, array in tensors.items():
        numpy_type = numpy_name(declared.get(name, ""))
        if (array.dtype.name in _INTEGERS and numpy_type in (*_INTEGERS, *_REAL, BFLOAT16)) or (
            array.dtype.name in _REAL and numpy_type in (*_REAL, BFLOAT16)
        ):
            try:
                result[name] = tensor(array.tolist(), numpy_type)
            except ValueError as error:
                problems.add(f"{name}: {error}", got=array.tolist())
    problems.raise_if_any(ConfigError)
    return result


def numpy_name(data_type: str) -> str:
    """numpy's name of a type in config.pbtxt; "" for one that no request has."""
    kind = data_type.removeprefix("TYPE_")
    if kind == "BF16":
        return BFLOAT16
    return np.dtype(NUMPY_TYPES[kind]).name if kind in NUMPY_TYPES else ""


def step_of(config: Mapping[str, Any]) -> SequenceStep | None:
    """Return a request's position in its session; sequence_id 0: no session."""
    if not config["sequence_id"]:
        return None
    return SequenceStep(config["sequence_id"], config["sequence_start"], config["sequence_end"])


def print_stream(responses: Iterable[Tensors], test: bool) -> None:
    """A line for every response of a decoupled model: when it came and the tokens so far."""
    start = time.perf_counter()
    before: NDArray[Any] | None = None
    for response in responses:
        seconds = time.perf_counter() - start
        chance = ""
        if "cum_log_probs" in response:
            chance = f" (probability {np.exp(response['cum_log_probs'][0, 0]):.2e})"
        if "output_ids" in response:
            tokens = response["output_ids"][0, 0, : int(response["sequence_length"][0, 0])]
            if test:
                check_one_more(before, tokens)
            before = tokens
            printed: Any = tokens
        else:  # an ensemble: text
            printed = "\n".join(f"{name}: {with_text(array)}" for name, array in response.items())
        print(f"[After {seconds:.2f}s] Partial result{chance}:\n{printed}\n", flush=True)


def check_one_more(before: NDArray[Any] | None, tokens: NDArray[Any]) -> None:
    """Raises ServerError unless `tokens` are those `before` and one more."""
    if before is None:
        return
    if len(tokens) != len(before) + 1 or tokens[:-1].tolist() != before.tolist():
        raise ServerError(
            problem(
                "a response does not add one token to the one before",
                got=f"{before.tolist()}, then {tokens.tolist()}",
            )
        )


def with_text(array: NDArray[Any]) -> NDArray[Any]:
    """The array, with UTF-8 as text."""
    if array.dtype != np.object_:
        return array
    texts = [value.decode("utf-8", "replace") for value in array.ravel()]
    return np.array(texts, dtype=np.object_).reshape(array.shape)


def merge_mappings(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`below` with the values of `above` put over it, mapping by mapping."""
    result = dict(below)
    for key, value in above.items():
        lower = result.get(key)
        if isinstance(value, Mapping) and isinstance(lower, Mapping):
            value = merge_mappings(lower, value)
        result[key] = value
    return result


def read_request(path: Path) -> dict[str, Any]:
    try:
        return parse_request(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ConfigError(f"cannot read the request: {error}") from error


def parse_request(text: str, origin: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{origin} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(
            problem(f"{origin} must hold one JSON object", got=type(content).__name__)
        )
    return content


def check_request_file(request: Mapping[str, Any], origin: str) -> tuple[dict[str, Any], Tensors]:
    """(config, tensors by name); raises ConfigError with every problem of the request."""
    problems = Problems(origin)
    config = request["config"]
    for key in sorted(set(config) - set(DEFAULT_CONFIG)):
        problems.add("unknown key of config", got=key, choices=DEFAULT_CONFIG)
    if config["protocol"] not in DEFAULT_ADDRESSES:
        problems.add("unknown protocol", got=config["protocol"], choices=DEFAULT_ADDRESSES)
    tensors: Tensors = {}
    for number, field in enumerate(request.get("request", [])):
        try:
            tensors[field["name"]] = tensor(field["data"], field["dtype"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            problems.add(f"tensor {number} of request: {type(error).__name__}: {error}")
    if not request.get("request"):
        problems.add("request is missing or empty")
    problems.raise_if_any(ConfigError)
    return dict(config), tensors


def tensor(data: Any, dtype: str) -> NDArray[Any]:
    """Nested lists as an array; "object" is text, "bfloat16" is rounded to the nearest."""
    if dtype == "object":
        texts = np.array(data, dtype=np.object_)
        encoded = [str(text).encode("utf-8") for text in texts.ravel()]
        return np.array(encoded, dtype=np.object_).reshape(texts.shape)
    array = np.array(data)
    if dtype == BFLOAT16:
        import ml_dtypes  # tells numpy of the type; tritonclient brings it along

        return array.astype(ml_dtypes.bfloat16)
    array_type = np.dtype(dtype)
    if array_type.kind in "ui" and array.dtype.kind in "uif":
        limits = np.iinfo(array_type)
        if array.size and not (limits.min <= array.min() and array.max() <= limits.max):
            raise ValueError(f"values outside of {dtype}")
    return array.astype(array_type)
