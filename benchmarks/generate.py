"""How long one request takes at batch 1: the engine beside its peers, on random bfloat16 weights.

    python3 -m benchmarks.generate --out generate.json [--shapes 126m 1.3b 5b 20b] [--peers ...]

Every time is a whole request: prompt, every decode step with its embedding, logits and argmax, and
the tokens on the host. Floors are the bytes of the weights over the read bandwidth measured in the
same run. Greedy, so no end token can cut a request short.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.plain_torch import PlainTorchGPT
from benchmarks.shapes import SHAPES
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.common.quantization import Quantization
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.engine import Engine, EngineSettings
from launcher_scripts.engine.model.families import engine_family, kernels_for
from launcher_scripts.engine.model.weights import ModelWeights
from launcher_scripts.engine.runner.loading import assemble_runner, prepare_process
from launcher_scripts.kernels.operands import Linear
from launcher_scripts.models.gpt import GPTConfig
from launcher_scripts.models.t5 import T5Config

DEVICE = torch.device("cuda", 0)
LENGTHS = ((60, 20), (200, 200))
READ_WIDTHS = (4096, 8192, 16384)  # of matrices whose reading shows what the device can
LAUNCHES = 8

# prompt [T] and output length -> generated ids
Generator = Callable[[list[int], int], list[int]]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("there is no CUDA device; the shapes are far beyond a CPU", file=sys.stderr)
        return 1
    report: dict = {"machine": machine(), "bandwidth": bandwidths(), "rows": []}
    print(json.dumps(report["machine"]), json.dumps(report["bandwidth"]), flush=True)
    print(f"{'model':6} {'in/out':8} {'floor':>9} {'engine':>9} ms/token", *arguments.peers)
    for name in arguments.shapes:
        for row in measure(name, arguments, report["bandwidth"]["read_tb_per_s"]):
            report["rows"].append(row)
            peers = [f"{peer} {row['peers'][peer]:.1f} ms" for peer in row["peers"]]
            print(
                f"{name:6} {row['input']}/{row['output']:<5} {row['floor_ms']:9.2f} "
                f"{row['engine_ms']:9.2f} {row['engine_ms_per_token']:8.4f} ",
                *peers,
                flush=True,
            )
            if arguments.out:
                arguments.out.write_text(json.dumps(report, indent=2), encoding="utf-8")
    return 0


def measure(name: str, arguments: argparse.Namespace, read_tb_per_s: float) -> list[dict]:
    """One row per pair of lengths, all on one model in memory."""
    weights = random_weights(SHAPES[name].config())
    floor = weights.bytes() / (read_tb_per_s * 1e12) * 1e3
    engine = engine_over(weights)
    rows: list[dict] = []
    for prompt_len, output_len in LENGTHS:
        rows.append(
            {
                "model": name,
                "input": prompt_len,
                "output": output_len,
                "weight_bytes": weights.bytes(),
                "floor_ms": floor * output_len,
                "engine_ms": latency(engine_generator(engine), prompt_len, output_len, arguments),
                "peers": {},
            }
        )
    for row in rows:
        row["engine_ms_per_token"] = per_token_ms(rows)
    engine.close()
    del engine
    for peer in arguments.peers:
        release()
        generator = PEERS[peer](weights)
        if generator is None:
            continue
        for row in rows:
            row["peers"][peer] = latency(generator, row["input"], row["output"], arguments)
        del generator
    for row in rows:
        row["ratios"] = {
            peer: round(value / row["engine_ms"], 2) for peer, value in row["peers"].items()
        }
    del weights
    release()
    return rows


def per_token_ms(rows: list[dict]) -> float:
    """Milliseconds per token between the shortest and the longest measured request."""
    short, long = rows[0], rows[-1]
    return (long["engine_ms"] - short["engine_ms"]) / (long["output"] - short["output"])


def latency(
    generate: Generator, prompt_len: int, output_len: int, arguments: argparse.Namespace
) -> float:
    """Median milliseconds of a request, after two that warm up."""
    prompt = [(37 * index + 11) % 50000 for index in range(prompt_len)]
    times = []
    for _ in range(arguments.repeat + 2):
        torch.cuda.current_stream().synchronize()
        start = time.perf_counter()
        tokens = generate(prompt, output_len)
        times.append((time.perf_counter() - start) * 1e3)
        if len(tokens) != output_len:
            raise RuntimeError(f"{len(tokens)} tokens came, {output_len} were asked for")
    return statistics.median(times[2:])


def random_weights(
    config: GPTConfig | T5Config,
    parallelism: Parallelism = Parallelism(),
    rank: int = 0,
    *,
    quantization: Quantization | None = None,
) -> ModelWeights:
    """One rank's weights, of a size that keeps activations in range, made on its device."""
    torch.manual_seed(0)
    tp_size, device = parallelism.tp_size, torch.device("cuda", rank)

    class DeviceLoader(engine_family(config).loader):
        def _table(self, name: str, size: str = "vocab_size") -> torch.Tensor:
            rows = config.local_size(size, tp_size)
            whole = self._specs[name].shape_on(config, 1)
            return self._random((rows, *whole[1:]), torch.bfloat16)

        def _tensor(self, name: str, dtype: torch.dtype, _: int | None = None) -> torch.Tensor:
            spec = self._specs[name]
            values = self._random(spec.shape_on(config, tp_size), dtype)
            is_gain = "norm" in spec.name and spec.name.endswith("weight")
            return values.add_(1) if is_gain else values

        def _random(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device).normal_(0, 0.02)

    def nothing_to_read(spec, layer):
        raise RuntimeError(f"{spec.name} of layer {layer} should have been random")

    return DeviceLoader(
        config,
        parallelism,
        rank,
        torch.bfloat16,
        device,
        nothing_to_read,
        quantization=quantization,
    ).load()


def engine_settings(**more: object) -> EngineSettings:
    return EngineSettings(Path("random"), data_type="bf16", device="cuda", **more)


def engine_over(
    weights: ModelWeights, max_batch_size: int = 8, max_tokens: int | None = 4096, **more: object
) -> Engine:
    settings = engine_settings(max_batch_size=max_batch_size, max_tokens=max_tokens, **more)

    def build():
        prepare_process(settings, DEVICE)
        return assemble_runner(weights, settings, Communicator(), DEVICE)

    return Engine.from_runner(settings, build)


def engine_generator(engine: Engine) -> Generator:
    def generate(prompt: list[int], output_len: int) -> list[int]:
        return list(engine.submit(GenerateRequest(tuple(prompt), output_len)).result().output_ids)

    return generate


def plain_torch_generator(weights: ModelWeights) -> Generator:
    model = PlainTorchGPT(weights, max_tokens=max(sum(pair) for pair in LENGTHS) + 1)

    def generate(prompt: list[int], output_len: int) -> list[int]:
        return model.generate(torch.tensor(prompt, device=DEVICE), output_len)

    return generate


def transformers_generator(weights: ModelWeights) -> Generator | None:
    """transformers' GPT-2 of the same sizes, with random weights of its own."""
    if importlib.util.find_spec("transformers") is None:
        return None
    from benchmarks.transformers_models import Model

    model = Model(Path(), weights.config, DEVICE.type)

    def generate(prompt: list[int], output_len: int) -> list[int]:
        return model.new_tokens([prompt], output_len)[0]

    return generate


PEERS: dict[str, Callable[[ModelWeights], Generator | None]] = {
    "torch_graph": plain_torch_generator,
    "transformers": transformers_generator,
}


def bandwidths() -> dict[str, float]:
    """TB/s of a device-to-device copy (bytes read and written), and of reading: the most that
    torch's and the engine's matrix-vector products of 2 GB reach, one launch behind the other.
    """
    source = torch.randn(1 << 30, device=DEVICE, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copied = _seconds(lambda: target.copy_(source))
    read = min(_seconds(reader) for width in READ_WIDTHS for reader in _readers(source, width))
    size = source.numel() * source.element_size()
    return {
        "copy_tb_per_s": round(2 * size / copied / 1e12, 2),
        "read_tb_per_s": round(size / read / 1e12, 2),
    }


def _readers(source: Tensor, width: int) -> tuple[Callable[[], object], ...]:
    """Products that read all of `source` once, as rows of `width` numbers."""
    matrix = source.view(-1, width)
    vector = torch.randn(1, width, device=DEVICE, dtype=torch.bfloat16)
    linear, project = Linear(matrix), kernels_for("cuda").project
    return lambda: functional.linear(vector, matrix), lambda: project(vector, linear)


def _seconds(function: Callable[[], object]) -> float:
    """Median seconds of a launch among LAUNCHES that follow each other, by the device's events."""
    times = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(LAUNCHES):
            function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / LAUNCHES)
    return statistics.median(times[2:])


def machine() -> dict[str, str]:
    return {
        "device": torch.cuda.get_device_name(DEVICE),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        **{
            name: importlib.import_module(name).__version__
            for name in ("triton", "transformers")
            if importlib.util.find_spec(name) is not None
        },
    }


def release() -> None:
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
