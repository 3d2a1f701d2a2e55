"""Time on the device of one decode step or one encoder's pass: a graph of it, replayed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.engine.core.beam_search import beam_batches
from launcher_scripts.engine.core.sampler import SamplingBatch
from launcher_scripts.engine.messages.plan import Bounds, RowStart
from launcher_scripts.engine.model.encoder import Sources, pack_rows, pass_tokens
from launcher_scripts.engine.runner.graphs import MIN_REORDER, bucket_bounds
from launcher_scripts.engine.runner.runner import Runner

STEPS = 8
FILLED_TOKENS = 4096  # at once
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
    requests = [
        GenerateRequest(
            (),
            0,
            replace(sampling, random_seed=slot),
            lora_adapter=adapters[slot] if adapters else None,
        )
        for slot in range(rows)
    ]
    extent = _extent(context, source)
    starts = [
        RowStart(slot, slot * extent + source, (slot,), -1, request, source=(0,) * source)
        for slot, request in enumerate(requests)
    ]
    bounds = bucket_bounds(Bounds(context + STEPS, source, lora=bool(adapters)))
    with torch.inference_mode():
        batch = SamplingBatch(starts, runner.device)
        return _rows_ms(
            runner,
            starts,
            context,
            lambda: runner.token_step(batch.slots, bounds, batch.choice),
            repeat,
        )


def beam_step_ms(
    runner: Runner, searches: int, width: int, context: int, source: int = 0, repeat: int = 20
) -> float:
    """Median milliseconds of a step of so many beam searches; see `step_ms`."""
    extent = _extent(context, source)
    request = GenerateRequest((), 0, SamplingParameters(beam_width=width))
    starts = [
        RowStart(
            search * width,
            search * (source + width * extent) + source,
            (1,),
            -1,
            request,
            source=(0,) * source,
            beams=tuple(range(search * width, (search + 1) * width)),
            stride=extent,
            spacing=extent,
        )
        for search in range(searches)
    ]
    bounds = bucket_bounds(Bounds(context + STEPS, source))
    with torch.inference_mode():
        (batch,) = beam_batches(starts, runner.device)
        return _rows_ms(
            runner,
            starts,
            context,
            lambda: runner.beam_step(batch.slots, batch, bounds, MIN_REORDER),
            repeat,
        )


def _extent(context: int, source: int) -> int:
    return source + context + STEPS + 1


def _rows_ms(
    runner: Runner,
    starts: Sequence[RowStart],
    context: int,
    step: Callable[[], object],
    repeat: int,
) -> float:
    """Of a step over these rows, each with `context` tokens cached."""
    slots = [slot for row in starts for slot, _ in row.places]
    ends = [start + context + STEPS for row in starts for _, start in row.places]
    if max(ends) > runner.decoder.cache.capacity:
        raise ValueError(f"{len(slots)} rows of {context} tokens do not fit the cache")
    _fill(runner)
    runner.states.join(starts)

    def rewind() -> None:
        runner.states.length[slots] = context - STEPS // 2

    return _replayed_ms(step, rewind, repeat)


def encode_ms(runner: Runner, tokens: int, repeat: int = 20) -> float:
    """Median milliseconds of the encoder's pass over one input, filled up as a recorded one is."""
    step, filled = runner.decoder.encode_step, pass_tokens(tokens)
    if step is None:
        raise ValueError("the model has no encoder that takes fused steps")
    values = pack_rows([((1,) * tokens, 0)], runner.decoder.cache.scratch, filled)
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
        for part in (layer.keys, layer.values):
            for tokens in part.split(FILLED_TOKENS, 1):
                tokens.copy_(torch.randn(tokens.shape, device=tokens.device))
