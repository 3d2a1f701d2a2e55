"""Cost of a measured rate at a GPU's price, and its distance from the hardware's limit.

A floor is the least time that reading takes: for every token of a row, a decode step reads the
weights once for all rows, and the keys and values of each row's context. It counts no arithmetic
and no communication, so no server can be faster.
"""

from __future__ import annotations

import configparser
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher_scripts.common.errors import LauncherError
from launcher_scripts.common.quantization import kv_cache_dtype_of, quantization_of
from launcher_scripts.evaluation.served.tokenizer_dir import read_model_ini
from launcher_scripts.models.repository import config_parameters, served_models

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
