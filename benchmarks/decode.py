"""Single steps on one GPU: decode by model, batch and context, prefill, and T5; floors beside.

    python3 -m benchmarks.decode --out decode.json [--shapes 126m 5b t5-base ...]
    python3 -m benchmarks.decode --shapes 8b-modern --cases 128x2048 --kv-cache-dtype fp8
    python3 -m benchmarks.decode --shapes 8b-modern 8b-modern-int4 gpt-oss-20b gpt-oss-20b-mxfp4 \
        --cases 1x80 32x80
    python3 -m benchmarks.decode --shapes nemotron-h-8b qwen3-next-12 --cases 1x1024 32x1024 \
        --prompt 8192 --before

Floors are the bytes a step has to read (weights, the keys and values of the context, and states of
rows) over the read bandwidth measured in the same run; of a prefill, its operations over the rate
of a large matrix product. Weights are random bfloat16. Decoding is greedy but for the rows with a
`choice`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.generate import (
    DEVICE,
    bandwidths,
    engine_over,
    engine_settings,
    machine,
    random_weights,
    release,
)
from benchmarks.shapes import CONFIGS, HYBRIDS, LARGE
from benchmarks.steps import STEPS, beam_step_ms, step_ms
from launcher_scripts.common.quantization import (
    FOUR_BITS,
    KV_CACHE_DTYPES,
    QUANTIZATIONS,
    Quantization,
)
from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.messages.plan import PrefillPart, RowStart
from launcher_scripts.engine.model.layers import Chunk
from launcher_scripts.engine.model.weights import Experts, ModelWeights, sublayers_of
from launcher_scripts.engine.runner.loading import assemble_runner, prepare_process
from launcher_scripts.engine.runner.prompt_batch import Nowhere, PackedPrompts, unpacked
from launcher_scripts.engine.runner.runner import Runner
from launcher_scripts.kernels import reference
from launcher_scripts.kernels.operands import Linear
from launcher_scripts.models.gpt import GPTConfig
from launcher_scripts.models.t5 import T5Config

GPT_CASES = ((1, 80), (1, 1024), (8, 80), (32, 80), (128, 80))
CHOICES = {
    "greedy": SamplingParameters(),
    "sampled": SamplingParameters(top_k=40, top_p=0.9, temperature=0.8),
    "top_p": SamplingParameters(top_p=0.9, temperature=0.8),
    "processed": SamplingParameters(
        top_k=40, top_p=0.9, temperature=0.8, repetition_penalty=1.1, no_repeat_ngram_size=3
    ),
}
CHOICE_CASES = ((1, 80), (128, 80))
BEAM_CASES = ((1, 4, 80), (8, 4, 80))  # searches, width, context
T5_CASES = ((1, 40, 200), (32, 64, 128))  # rows, context, source
# rows, lengths of their inputs, output; the last ones are what TensorRT-LLM was published with
T5_REQUESTS = (
    (1, (60, 60), 20),
    (32, (128, 128), 64),
    (32, (260, 440), 128),
    (64, (260, 440), 128),
    (128, (260, 440), 128),
)
PREFILL_TOKENS = 2048
PREFILL_SHAPES = ("5b", "30b-a3b")
# Also with the weights of their layers in bytes, and in four bits.
QUANTIZED = ("5b", "20b", "8b-modern", "30b-a3b", "t5-3b")
IN_FOUR_BITS = {"int4": ("8b-modern", "30b-a3b"), "mxfp4": ("gpt-oss-20b",)}
MODELS: dict[str, GPTConfig | T5Config] = {
    name: config for name, config in CONFIGS.items() if name not in LARGE
} | {
    f"{name}-{kind}": CONFIGS[name]
    for kind in QUANTIZATIONS
    for name in IN_FOUR_BITS.get(kind, QUANTIZED)
}
# What has kernels for states of rows and latent vectors, and a definition in torch.
OF_STATES = ("short_conv", "mamba2", "delta")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=MODELS | HYBRIDS, default=list(MODELS))
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    parser.add_argument(
        "--cases", nargs="+", type=case, help="ROWSxCONTEXT of a GPT's steps, and nothing else"
    )
    parser.add_argument("--prompt", type=int, help="beside --cases, a prompt of so many tokens")
    parser.add_argument(
        "--before", action="store_true", help="also --cases and --prompt without fused steps"
    )
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("there is no CUDA device; the shapes are far beyond a CPU", file=sys.stderr)
        return 1
    report = {
        "machine": machine(),
        "bandwidth": bandwidths(),
        "matrix_tflops": round(matrix_tflops(), 1),
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "rows": [],
    }
    release()
    print(json.dumps({key: report[key] for key in ("bandwidth", "matrix_tflops")}), flush=True)
    for name in arguments.shapes:
        config = (MODELS | HYBRIDS)[name]
        found: Iterable[dict]
        if arguments.cases:
            found = step_rows(name, config, report, arguments)
        elif isinstance(config, T5Config):
            found = measure_t5(name, config, report)
        else:
            found = measure_gpt(name, config, report)
        for row in found:
            report["rows"].append(row)
            print(json.dumps(row), flush=True)
        release()
        if arguments.out:
            arguments.out.write_text(json.dumps(report, indent=2), encoding="utf-8")
    return 0


def case(text: str) -> tuple[int, int]:
    """Rows and context of ROWSxCONTEXT."""
    rows, context = map(int, text.split("x"))
    return rows, context


def measure_gpt(name: str, config: GPTConfig, report: dict) -> list[dict]:
    weights = random_weights(config, quantization=quantization_in(name))
    runner = runner_over(weights, 128, 16384, report["kv_cache_dtype"])
    rows = [
        gpt_row(name, report, runner, read_bytes(weights, count), count, context)
        for count, context in GPT_CASES
    ]
    rows += choice_rows(name, runner)
    if name in PREFILL_SHAPES:
        rows.append(prefill_row(name, config, runner, weights, report))
    return rows


def step_rows(
    name: str, config: GPTConfig, report: dict, arguments: argparse.Namespace
) -> Iterator[dict]:
    """Steps of such rows and contexts, and a prompt."""
    weights = random_weights(config, quantization=quantization_in(name))
    cases, prompt = arguments.cases, arguments.prompt or 0
    most = max(count for count, _ in cases)
    tokens = max(prompt, *(count * (context + STEPS + 1) for count, context in cases))
    runner = runner_over(weights, most, tokens, report["kv_cache_dtype"])
    for ways in (nullcontext(), general(runner))[: 1 + arguments.before]:
        more = {} if isinstance(ways, nullcontext) else {"before": True}
        with ways:
            for count, context in cases:
                read = read_bytes(weights, count)
                yield gpt_row(name, report, runner, read, count, context) | more
            if prompt:
                yield prefill_row(name, config, runner, weights, report, prompt) | more


@contextmanager
def general(runner: Runner) -> Iterator[None]:
    """In the block, no fused steps, and no kernels for states."""
    fused, step = runner.decoder.kernels, runner.decoder.step
    names = [f"{kind}_{of}" for kind in ("scan", "step") for of in OF_STATES]
    names += ["store_latents", "attend_latents"]
    own = {name: getattr(fused, name) for name in names}
    try:
        runner.decoder.step = None
        for name in names:
            setattr(fused, name, getattr(reference, name))
        yield
    finally:
        runner.decoder.step = step
        for name, function in own.items():
            setattr(fused, name, function)


def read_bytes(weights: ModelWeights, rows: int) -> int:
    """Of the weights, by a step of so many rows, which choose among experts at random."""
    whole, embedding = weights.bytes(), weights.decoder.embedding
    if weights.head is not None and embedding is not None:
        tied = embedding.tokens.data_ptr() == weights.head.weight.data_ptr()
        whole -= 0 if tied else _bytes(embedding.tokens)
    for experts in sublayers_of(weights.decoder.layers.values()):
        if isinstance(experts, Experts):
            count = experts.router.linear.weight.shape[0]
            unread = (1 - experts.router.per_token / count) ** rows
            linears = (experts.in_proj, experts.gate, experts.out_proj)
            whole -= int(unread * sum(_linear_bytes(each) for each in linears if each))
    return whole


def gpt_row(
    name: str, report: dict, runner: Runner, weight_bytes: int, count: int, context: int
) -> dict:
    cache = runner.decoder.cache
    states = sum(_bytes(pool[:, 0]) for pool in cache.row_states.pools)
    needed = weight_bytes + count * (context * cache.token_bytes + states)
    ms = step_ms(runner, count, context)
    return _row(name, report, needed, ms, rows=count, context=context)


def choice_rows(name: str, runner: Runner) -> list[dict]:
    """Steps whose rows choose their tokens in several ways, beside greedy ones of the same run."""
    rows = []
    for count, context in CHOICE_CASES:
        ms = {
            choice: step_ms(runner, count, context, sampling=sampling)
            for choice, sampling in CHOICES.items()
        }
        for choice, own in ms.items():
            more = round(own / ms["greedy"] - 1, 3)
            shape = {"model": name, "rows": count, "context": context}
            rows.append({**shape, "choice": choice, "ms": round(own, 4), "over_greedy": more})
    return rows + beam_rows(name, runner)


def beam_rows(name: str, runner: Runner, source: int = 0) -> list[dict]:
    """Steps of beam searches, beside greedy ones of as many rows."""
    rows = []
    for searches, width, context in BEAM_CASES:
        own = beam_step_ms(runner, searches, width, context, source)
        greedy = step_ms(runner, searches * width, context, source)
        shape = {"model": name, "rows": searches * width, "context": context}
        shape |= {"source": source} if source else {}
        more = round(own / greedy - 1, 3)
        ms = round(own, 4)
        rows.append({**shape, "choice": f"{width} beams", "ms": ms, "over_greedy": more})
    return rows


def measure_t5(name: str, config: T5Config, report: dict) -> list[dict]:
    weights = random_weights(config, quantization=quantization_in(name))
    runner = runner_over(weights, 32, 16384, report["kv_cache_dtype"])
    read = [weights.head.weight]
    for part in sublayers_of(weights.decoder.layers.values()):
        linears = (part.in_proj, part.out_proj, getattr(part, "gate", None))
        read += [linear.weight for linear in linears if linear is not None]
    rows = []
    for count, context, source in T5_CASES:
        cached = count * (context + source) * runner.decoder.cache.token_bytes
        needed = sum(map(_bytes, read)) + cached
        ms = step_ms(runner, count, context, source)
        rows.append(_row(name, report, needed, ms, rows=count, context=context, source=source))
    rows += beam_rows(name, runner, T5_CASES[0][2])
    del runner
    release()
    return rows + end_to_end(name, weights, report["kv_cache_dtype"])


def quantization_in(name: str) -> Quantization | None:
    """Of the model that has this name in MODELS."""
    return QUANTIZATIONS.get(name.rpartition("-")[2])


def _row(name: str, report: dict, needed: int, ms: float, **more: int) -> dict:
    floor = needed / report["bandwidth"]["read_tb_per_s"] / 1e9
    return {
        "model": name,
        **more,
        "ms": round(ms, 4),
        "read_tb_per_s": report["bandwidth"]["read_tb_per_s"],
        "floor_ms": round(floor, 4),
        "share_of_floor": round(floor / ms, 3),
    }


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _linear_bytes(linear: Linear) -> int:
    """Of a weight, and of its scales where they are many."""
    scales = linear.scale if linear.quantization in FOUR_BITS else None
    return _bytes(linear.weight) + (0 if scales is None else _bytes(scales))


def runner_over(weights: object, rows: int, tokens: int, kv_cache_dtype: str = "auto") -> Runner:
    settings = engine_settings(
        max_batch_size=rows, max_tokens=tokens, kv_cache_dtype=kv_cache_dtype
    )
    prepare_process(settings, DEVICE)
    with torch.inference_mode():
        return assemble_runner(weights, settings, Communicator(), DEVICE)


@torch.inference_mode()
def prefill_row(
    name: str,
    config: GPTConfig,
    runner: Runner,
    weights: ModelWeights,
    report: dict,
    tokens: int = PREFILL_TOKENS,
) -> dict:
    """A prompt of so many tokens through all layers, and the logits of its last token."""
    row = RowStart(0, 0, tuple(range(tokens)), -1)
    prompts = PackedPrompts([row], [PrefillPart(0, 0, tokens)])
    packed = prompts.to_device(DEVICE, Nowhere(runner.decoder.cache.scratch, 0), None)
    batch = unpacked(packed, prompts.sizes, prompts.spans, (Chunk(0, 0, tokens),))

    def run() -> None:
        runner.decoder.logits(runner.decoder.prefill(batch)[-1:])

    run()
    ms = statistics.median(_milliseconds(run) for _ in range(5))
    head = 0 if weights.head is None else _bytes(weights.head.weight)
    parameters = (read_bytes(weights, 1) - head) // 2
    layers = sum(config.has_branch(layer, "attention") for layer in range(config.num_layers))
    sizes = config.head_size + (config.value_head_size or config.head_size)
    attention = layers * tokens**2 * config.num_heads * sizes
    rate = (2 * parameters * tokens + attention) / ms / 1e9
    return {
        "model": name,
        "prefill_tokens": tokens,
        "ms": round(ms, 3),
        "tflops": round(rate, 1),
        "share_of_matrix_rate": round(rate / report["matrix_tflops"], 3),
    }


def end_to_end(name: str, weights: object, kv_cache_dtype: str) -> list[dict]:
    """Whole requests through the engine, all of one call at the same time."""
    engine = engine_over(weights, 128, 128 * 640, kv_cache_dtype=kv_cache_dtype)
    rows = []
    for count, (least, most), wanted in T5_REQUESTS:
        lengths = [least + (most - least) * row // count for row in range(count)]
        prompts = [
            tuple((37 * at + row) % 32000 for at in range(n)) for row, n in enumerate(lengths)
        ]
        times = []
        for _ in range(10):  # rows may join at other steps, whose shapes are new, for some time
            start = time.perf_counter()
            with engine.together():
                futures = [engine.submit(GenerateRequest(prompt, wanted)) for prompt in prompts]
            wait(futures)
            times.append((time.perf_counter() - start) * 1e3)
        rows.append(
            {
                "model": name,
                "rows": count,
                "input": least if least == most else f"{least}-{most}",
                "output": wanted,
                "engine_ms": round(statistics.median(times[5:]), 2),
            }
        )
    engine.close()
    return rows


def matrix_tflops(size: int = 8192) -> float:
    """Rate of a large bfloat16 product of random matrices."""
    left, right = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    ms = statistics.median(_milliseconds(lambda: left @ right) for _ in range(10))
    return 2 * size**3 / ms / 1e9


def _milliseconds(function) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


if __name__ == "__main__":
    sys.exit(main())
