"""Speed of a served model: a sweep over batch sizes and input and output lengths.

An encoder alone generates nothing: it is asked for its states, of every input length once.

Every measurement sends one request of `batch_size` rows after the other and waits for each, so a
latency is what a lone client sees. Token ids are random but the same in every run, and min_length
makes every row generate all its tokens.

Cost of a measured rate at a GPU's price, and its distance from the hardware's limit.

A floor is the least time that reading takes: for every token of a row, a decode step reads the
weights once for all rows, and the keys and values of each row's context. It counts no arithmetic
and no communication, so no server can be faster.
"""

from __future__ import annotations

import configparser
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from launcher_scripts.common.errors import ConfigError, LauncherError, ServerError, problem
from launcher_scripts.common.quantization import kv_cache_dtype_of, quantization_of
from launcher_scripts.config.evaluation import BenchmarkSettings
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest, SamplingParameters
from launcher_scripts.evaluation.tasks.prompts import read_model_ini
from launcher_scripts.models.repository import config_parameters, served_models

Generate = Callable[[Sequence[GenerateRequest]], list[GenerateOutput]]


@dataclass(frozen=True)
class SpeedRow:
    """One measurement; latencies in milliseconds per request, lengths in tokens per row.

    output_len: 0 for an encoder
    tokens_per_second: generated tokens of all requests, an encoder's input tokens, over the time
                       that they took together
    """

    batch_size: int
    input_len: int
    output_len: int
    requests: int
    latency_mean_ms: float
    latency_p50_ms: float
    latency_p90_ms: float
    latency_p99_ms: float
    tokens_per_second: float


def sweep(
    settings: BenchmarkSettings,
    vocab_size: int,
    generate: Generate,
    clock: Callable[[], float] = time.perf_counter,
    first: int = 0,
    *,
    encodes: bool = False,
) -> Iterator[SpeedRow]:
    """A row for every batch size with every pair of lengths, in the settings' order.

    first:   the number of rows that are there already
    encodes: the model is an encoder alone
    Raises ServerError when a row comes back shorter than asked for.
    """
    lengths = settings.lengths
    if encodes:
        lengths = tuple(dict.fromkeys((input_len, 0) for input_len, _ in lengths))
    points = list(product(lengths, settings.batch_sizes))
    for (input_len, output_len), batch_size in points[first:]:
        random = np.random.default_rng([batch_size, input_len, output_len])
        latencies = []
        for index in range(settings.warmup + settings.requests):
            rows = random_rows(random, batch_size, input_len, output_len, vocab_size)
            start = clock()
            outputs = generate(rows)
            elapsed = clock() - start
            if encodes:
                result = {len(output.hidden_state) for output in outputs}
                _check_lengths(result, input_len, f"give states of {input_len} tokens")
            else:
                result = {len(output.output_ids) for output in outputs}
                _check_lengths(result, output_len, f"generate {output_len} tokens")
            if index >= settings.warmup:
                latencies.append(elapsed)
        yield _row(batch_size, input_len, output_len, latencies)


def random_rows(
    random: np.random.Generator, batch_size: int, input_len: int, output_len: int, vocab_size: int
) -> list[GenerateRequest]:
    """`batch_size` greedy rows of random ids that cannot end before `output_len` tokens.

    With an output_len of 0 they ask an encoder for its states.
    """
    ids = random.integers(0, vocab_size, size=(batch_size, input_len))  # [B, S]
    sampling = SamplingParameters(min_length=output_len)
    return [
        GenerateRequest(
            tuple(int(token) for token in row),
            output_len,
            sampling,
            return_hidden_state=output_len == 0,
        )
        for row in ids
    ]


def check_batch_sizes(settings: BenchmarkSettings, max_batch_size: int) -> None:
    """Raises ConfigError when the model does not take that many rows in one request."""
    too_large = [size for size in settings.batch_sizes if size > max_batch_size]
    if too_large:
        raise ConfigError(
            problem(
                f"the served model takes at most {max_batch_size} rows in one request",
                got=too_large,
                change="evaluate.benchmark.batch_sizes, or export with a larger "
                "export.triton_deployment.max_batch_size",
            )
        )


def _check_lengths(lengths: set[int], expected: int, task: str) -> None:
    if lengths != {expected}:
        raise ServerError(problem(f"the server did not {task} per row", got=sorted(lengths)))


def _row(batch_size: int, input_len: int, output_len: int, latencies: Sequence[float]) -> SpeedRow:
    milliseconds = np.array(latencies) * 1000
    p50, p90, p99 = (float(value) for value in np.percentile(milliseconds, [50, 90, 99]))
    return SpeedRow(
        batch_size=batch_size,
        input_len=input_len,
        output_len=output_len,
        requests=len(latencies),
        latency_mean_ms=float(milliseconds.mean()),
        latency_p50_ms=p50,
        latency_p90_ms=p90,
        latency_p99_ms=p99,
        tokens_per_second=batch_size
        * (output_len or input_len)
        * len(latencies)
        / float(sum(latencies)),
    )


# Bytes per second that a GPU's memory gives, by torch's name of it; from NVIDIA's data sheets.
BANDWIDTH = {
    "NVIDIA A10": 600e9,
    "NVIDIA A30": 933e9,
    "NVIDIA A40": 696e9,
    "NVIDIA A100-PCIE-40GB": 1555e9,
    "NVIDIA A100-SXM4-40GB": 1555e9,
    "NVIDIA A100 80GB PCIe": 1935e9,
    "NVIDIA A100-SXM4-80GB": 2039e9,
    "NVIDIA B200": 8000e9,
    "NVIDIA H100 PCIe": 2000e9,
    "NVIDIA H100 80GB HBM3": 3350e9,
    "NVIDIA H100 NVL": 3900e9,
    "NVIDIA H200": 4800e9,
    "NVIDIA L4": 300e9,
    "NVIDIA L40": 864e9,
    "NVIDIA L40S": 864e9,
    "Tesla T4": 320e9,
    "Tesla V100-SXM2-16GB": 900e9,
    "Tesla V100-SXM2-32GB": 900e9,
}


def gpus(measured_on: Mapping[str, Any]) -> list[str]:
    """The names of the GPUs that served, those of all replicas; none for a server on CPUs."""
    server = measured_on.get("server", {})
    devices = [str(rank.get("device")) for rank in server.get("ranks", [])]
    names = [device.partition("(")[2].rstrip(")") for device in devices if "cuda" in device]
    return names * len(server.get("replicas", [0]))


def price_of(tokens_per_second: float, gpu_count: int, gpu_price: float) -> float:
    """Return the price of a million tokens; gpu_price: of one GPU for an hour."""
    return gpu_price * gpu_count / 3600 / tokens_per_second * 1e6


def cost_table(report: Mapping[str, Any]) -> dict[str, Any] | None:
    """The fastest valid run of every path, else the fastest measurement of the speed sweep.

    None where nothing was measured on GPUs. `price` is None where none was given.
    """
    load: Mapping[str, Any] = report.get("load") or {}
    speed: Mapping[str, Any] = report.get("speed") or {}
    best: dict[str, Mapping[str, Any]] = {}
    for run in load.get("runs", []):
        if run["valid"] and run["tokens_per_second"] > _rate(best.get(run["path"])):
            best[run["path"]] = run
    if best:
        on = load["measured_on"]
    elif speed.get("rows"):
        on, row = speed["measured_on"], max(speed["rows"], key=_rate)
        best = {_sizes(row): row}
    else:
        return None
    rows = [{"what": label, **_priced(row, on)} for label, row in best.items()]
    return {"rows": rows, "price": on.get("gpu_price"), "gpus": gpus(on)} if gpus(on) else None


def _rate(row: Mapping[str, Any] | None) -> float:
    return 0.0 if row is None else float(row["tokens_per_second"])


def _priced(row: Mapping[str, Any], on: Mapping[str, Any]) -> dict[str, Any]:
    price: float | None = on.get("gpu_price")
    rate = _rate(row)
    if price is None or not rate:
        return {"rate": rate, "cost": None}
    return {"rate": rate, "cost": price_of(rate, len(gpus(on)), price)}


def _sizes(row: Mapping[str, Any]) -> str:
    return f"{row['batch_size']} x {row['input_len']} in, {row['output_len']} out"


def floor_table(report: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the measurements with their lower limit; None for an unknown GPU or model."""
    rows: list[dict[str, Any]] = []
    metadata: dict[str, Any] = {}
    for name in ("speed", "load"):
        section: Mapping[str, Any] = report.get(name) or {}
        reads = StepReads.of(section["measured_on"]) if section else None
        if reads is None:
            continue
        metadata = {
            "device": reads.device,
            "bandwidth": reads.bandwidth,
            "weights": reads.step_bytes,
        }
        rows += [_speed_floor(row, reads) for row in section.get("rows", [])]
        rows += [_load_floor(run, reads) for run in section.get("runs", []) if _has_floor(run)]
    return {"rows": rows, **metadata} if rows else None


def _has_floor(run: Mapping[str, Any]) -> bool:
    return bool(run["valid"] and run["clients"] and run["generated_tokens"])


def _speed_floor(row: Mapping[str, Any], reads: StepReads) -> dict[str, Any]:
    context = row["input_len"] + row["output_len"] / 2
    floor = 1e3 * row["output_len"] * reads.step_seconds(row["batch_size"], context)
    measured = row["latency_p50_ms"]
    return {
        "what": f"a request, {_sizes(row)}",
        "measured": f"{measured:,.1f} ms",
        "floor": f"at least {floor:,.1f} ms",
        "share": floor / measured,
    }


def _load_floor(run: Mapping[str, Any], reads: StepReads) -> dict[str, Any]:
    requests, clients = run["requests"], run["clients"]
    context = run["prompt_tokens"] / requests + run["generated_tokens"] / requests / 2
    max_rate = clients / reads.step_seconds(clients, context)
    return {
        "what": f"{run['path']}, {clients} client{'' if clients == 1 else 's'}",
        "measured": f"{run['tokens_per_second']:,.0f} tokens/s",
        "floor": f"at most {max_rate:,.0f} tokens/s",
        "share": run["tokens_per_second"] / max_rate,
    }


@dataclass(frozen=True)
class StepReads:
    """The bytes that a decode step reads, and the bandwidth of the GPUs that share it.

    step_bytes: of weights, by all ranks together; token_bytes: of keys and values, for each token
    of a row's context; ranks: tensor-parallel ones, whose memories are read at once
    """

    device: str
    bandwidth: float
    step_bytes: float
    token_bytes: float
    ranks: int

    @classmethod
    def of(cls, measured_on: Mapping[str, Any]) -> StepReads | None:
        """None for a model that nothing is known of, other GPUs than one, and several servers."""
        reads, names = measured_on.get("reads"), gpus(measured_on)
        if not reads or len(set(names)) != 1 or names[0] not in BANDWIDTH:
            return None
        if "replicas" in measured_on["server"]:
            return None
        sizes = (reads["step_bytes"], reads["token_bytes"], reads["ranks"])
        return cls(names[0], BANDWIDTH[names[0]], *sizes)

    def step_seconds(self, rows: int, context: float) -> float:
        """The floor of one step of so many rows, of so many tokens on average."""
        read = self.step_bytes + rows * context * self.token_bytes
        return read / self.bandwidth / self.ranks


ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
# Not read whole: positions, embeddings beside a head, and of T5 the encoder with the keys and
# values that are made of its output.
_GPT = re.compile(r"model\.(layers\.|final_layernorm|lm_head)")
_T5 = re.compile(r"decoder\.(?!.*EncDecAttention\.[kv]\.)|lm_head\.")
# With one of these a step reads a part that depends on the tokens.
_PARTIAL = {"num_experts", "sliding_window"}


def step_reads(ready: Mapping[str, Any], model_name: str) -> dict[str, float] | None:
    """`step_bytes` of weights, `token_bytes` of keys and values per token of context, and `ranks`.

    step_bytes are those of all ranks together, of which `ranks` (tensor-parallel ones) read at
    once. None where the repository cannot be read from here, for quantized weights, and for a model
    that reads only a part of itself.
    """
    try:
        repository = Path(ready["model_repository"])
        model = next(model for model in served_models(repository) if model.name == model_name)
        text = (repository / model_name / "config.pbtxt").read_text(encoding="utf-8")
        parameters = config_parameters(text)
        ini = read_model_ini(model.checkpoint_dir)
        item_bytes = ITEM_BYTES[parameters["data_type"]]
        mode, quantization = int(parameters.get("int8_mode", "0")), parameters.get("quantization")
        if quantization_of(mode, quantization, "{}") or _PARTIAL & set(_section(ini, "extension")):
            return None
        in_bytes = kv_cache_dtype_of(parameters.get("kv_cache_dtype"), "{}") == "fp8"
        weights, cached = _gpt(ini, model.checkpoint_dir) if "gpt" in ini else _t5(ini)
        main = ini["gpt" if "gpt" in ini else "decoder"]
        stored = ITEM_BYTES[main["weight_data_type"]]
        files = (path for path in model.checkpoint_dir.glob("*.bin") if weights.match(path.name))
        return {
            "step_bytes": sum(path.stat().st_size for path in files) / stored * item_bytes,
            "token_bytes": float(cached * (1 if in_bytes else item_bytes)),
            "ranks": model.parallelism.tp_size,
        }
    except (LauncherError, OSError, KeyError, ValueError, StopIteration):
        return None


def _gpt(ini: configparser.RawConfigParser, folder: Path) -> tuple[re.Pattern[str], int]:
    """The files that a step reads, and the numbers that it keeps for every token."""
    gpt = ini["gpt"]
    heads = int(_section(ini, "extension").get("num_kv_heads", gpt["head_num"]))
    cached = 2 * int(gpt["num_layer"]) * heads * int(gpt["size_per_head"])
    if any(folder.glob("model.lm_head.weight*")):
        return _GPT, cached
    return re.compile(rf"{_GPT.pattern}|model\.wte"), cached


def _t5(ini: configparser.RawConfigParser) -> tuple[re.Pattern[str], int]:
    decoder = ini["decoder"]
    heads = int(_section(ini, "extension").get("num_kv_heads", decoder["num_heads"]))
    return _T5, 2 * int(decoder["num_layers"]) * heads * int(decoder["d_kv"])


def _section(ini: configparser.RawConfigParser, name: str) -> Mapping[str, str]:
    return ini[name] if ini.has_section(name) else {}
