"""Time on the device of one decode step or one encoder's pass: a graph of it, replayed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.engine.core.plan import Bounds, RowStart
from launcher_scripts.engine.core.sampler import SamplingBatch
from launcher_scripts.engine.model.encode_step import Sources, bucket_tokens, pack
from launcher_scripts.engine.runner.graphs import bucket_bounds
from launcher_scripts.engine.runner.runner import Runner

STEPS = 8
GREEDY = SamplingParameters()


def step_ms(
    runner: Runner,
    rows: int,
    context: int,
    source: int = 0,
    repeat: int = 20,
    sampling: SamplingParameters = GREEDY,
    adapters: Sequence[int] = (),
) -> float:
    """Median milliseconds of a step of `rows` rows, each with `context` tokens cached.

    Includes everything from the last token to the next one. A row reads `source` tokens of an
    encoder's input, too. sampling: what a CUDA graph can do;  adapters: the LoRA adapter of each
    row, where they have any
    """
    with torch.inference_mode():
        return _step_ms(runner, rows, context, source, repeat, sampling, adapters)


def _step_ms(
    runner: Runner,
    rows: int,
    context: int,
    source: int,
    repeat: int,
    sampling: SamplingParameters,
    adapters: Sequence[int],
) -> float:
    extent = source + context + STEPS + 1
    starts = [
        RowStart(
            slot,
            slot * extent + source,
            (1,),
            -1,
            GenerateRequest(
                (),
                0,
                replace(sampling, random_seed=slot),
                lora_adapter=adapters[slot] if adapters else None,
            ),
            source=(0,) * source,
        )
        for slot in range(rows)
    ]
    if rows * extent > runner.decoder.cache.capacity:
        raise ValueError(f"{rows} rows of {extent} tokens do not fit the cache")
    _fill(runner)
    runner.states.join(starts)
    batch = SamplingBatch(starts, runner.device)
    bounds = bucket_bounds(Bounds(context + STEPS, source, lora=bool(adapters)))

    def rewind() -> None:
        runner.states.length[:rows] = context - STEPS // 2

    return _replayed_ms(
        lambda: runner.token_step(batch.slots, bounds, batch.choice), rewind, repeat
    )


def encode_ms(runner: Runner, tokens: int, repeat: int = 20) -> float:
    """Median milliseconds of the encoder's pass over one input, filled up as a recorded one is."""
    step, filled = runner.decoder.encode_step, bucket_tokens(tokens)
    if step is None:
        raise ValueError("the model has no encoder that takes fused steps")
    values = pack([((1,) * tokens, 0)], runner.decoder.cache.scratch, filled)
    sources = Sources(torch.tensor(values, device=runner.device), filled)
    with torch.inference_mode():
        return _replayed_ms(lambda: step.forward(sources), lambda: None, repeat)


def _replayed_ms(function: Callable[[], object], rewind: Callable[[], None], repeat: int) -> float:
    """Milliseconds of a function's graph; rewind comes before every STEPS replays."""
    rewind()
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        function()
    times = []
    for _ in range(repeat + 2):
        rewind()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(STEPS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / STEPS)
    graph.reset()
    return statistics.median(times[2:])


def _fill(runner: Runner) -> None:
    """Texts, and keys and values that are no zeros: those can be faster to read."""
    runner.decoder.cache.ids.random_(runner.decoder.config.vocab_size)
    for layer in runner.decoder.cache.layers.values():
        layer.keys.normal_()
        layer.values.normal_()
