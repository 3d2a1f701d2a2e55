"""What tensor parallelism gains at batch 1, with and without enable_custom_all_reduce.

    python3 -m benchmarks.tensor_parallel --out tensor-parallel.json [--shapes 1.3b 5b 20b]

One process per GPU, each with random bfloat16 weights of its part, and all take the same steps.
First the sums alone are timed. Both are recorded in CUDA graphs. Floors are a rank's weight bytes
over the read bandwidth measured in the same run. Of a T5 the encoder's passes are timed, too; its
steps read a source, and their floors count the encoder.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import torch

from benchmarks.generate import (
    bandwidths,
    engine_settings,
    machine,
    random_weights,
    release,
)
from benchmarks.shapes import CONFIGS, LARGE
from benchmarks.steps import encode_ms, step_ms
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.engine.distributed.communicator import (
    LOOPBACK,
    Communicator,
    ProcessGroupCommunicator,
    join_store,
    open_store,
)
from launcher_scripts.engine.model.families import kernels_for
from launcher_scripts.engine.runner.loading import assemble_runner, prepare_process

TIMEOUT = 300.0
CONTEXT = 80
BATCHES = (1, 8, 32)
SOURCES = (60, 225)
SUMS_PER_GRAPH = 32
SUM_BYTES = tuple(4096 << (2 * step) for step in range(6))
WIDEST_ROW = 8192  # numbers


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=CONFIGS, default=["1.3b", "5b", "20b"])
    parser.add_argument("--only-custom", action="store_true", help="leave out NCCL, and sums alone")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args(argv)
    gpus = torch.cuda.device_count()
    if gpus < 2:
        print(f"two GPUs are needed; {gpus} found", file=sys.stderr)
        return 1
    report: dict = {"machine": machine(), "bandwidth": bandwidths(), "sums": [], "rows": []}
    release()
    sizes = [size for size in (2, 4, 8) if size <= gpus]
    for tp_size in [] if arguments.only_custom else sizes:
        report["sums"].append(in_processes(time_sums, tp_size, 1, arguments))
        print(json.dumps(report["sums"][-1]), flush=True)
    ways = (True,) if arguments.only_custom else (False, True)
    for tp_size, custom in [(1, False)] + [(size, on) for size in sizes for on in ways]:
        for row in in_processes(steps, tp_size, len(arguments.shapes), arguments, custom):
            report["rows"].append(with_floor(row, report))
            print(json.dumps(report["rows"][-1]), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(report, indent=2), encoding="utf-8")
    return 0


def with_floor(row: dict, report: dict) -> dict:
    """The row with its floor, and how many times faster it is than one GPU where that was asked."""
    row["floor_ms_per_step"] = row["rank_bytes"] / report["bandwidth"]["read_tb_per_s"] / 1e9
    same = (row["model"], row["rows"], 1)
    for old in [*report["rows"], row]:
        if (old["model"], old["rows"], old["tp_size"]) == same:
            row["speedup"] = round(old["ms_per_step"] / row["ms_per_step"], 2)
    return row


def in_processes(function, tp_size: int, groups: int, *more):
    """What rank 0 returns of function(rank, tp_size, ports, *more) in a process per rank."""
    context = multiprocessing.get_context("spawn")
    stores = [open_store(LOOPBACK, TIMEOUT) for _ in range(groups)]
    results = context.SimpleQueue()
    ranks = [
        context.Process(
            target=_rank,
            args=(results, function, rank, tp_size, [store.port for store in stores], *more),
        )
        for rank in range(tp_size)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
        if rank.exitcode:
            raise RuntimeError(f"a rank of {tp_size} ended with exit code {rank.exitcode}")
    return results.get()


def _rank(results: SimpleQueue, function, rank: int, *arguments) -> None:
    torch.cuda.set_device(rank)
    result = function(rank, *arguments)
    if rank == 0:
        results.put(result)


def time_sums(rank: int, tp_size: int, ports: list[int], _: argparse.Namespace) -> dict:
    """Microseconds of a float32 sum in a CUDA graph, by way and size."""
    device = torch.device("cuda", rank)
    communicator, kernels = join(rank, tp_size, ports[0]), kernels_for("cuda")
    times: dict[str, dict[int, float]] = {}
    for way in ("NCCL", "shared memory"):
        if way != "NCCL":
            communicator.use_peer_memory()
        times[way] = {}
        for size in SUM_BYTES:
            x = torch.randn(size // 4, device=device)
            x = x.view(-1, min(len(x), WIDEST_ROW))
            seconds = graph_seconds(lambda x=x: kernels.sum_over_ranks(x, communicator))
            times[way][size] = round(seconds * 1e6, 1)
    torch.cuda.synchronize()
    communicator.close()
    return {"tp_size": tp_size, "microseconds_by_bytes": times}


def graph_seconds(function) -> float:
    """Median seconds of one of many calls recorded in a graph."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(SUMS_PER_GRAPH):
            function()
    times = []
    for _ in range(15):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / SUMS_PER_GRAPH)
    graph.reset()
    return statistics.median(times[3:])


def join(rank: int, tp_size: int, port: int) -> Communicator:
    if tp_size == 1:
        return Communicator()
    return ProcessGroupCommunicator(
        Parallelism(tp_size),
        rank,
        join_store(LOOPBACK, port, TIMEOUT),
        torch.device("cuda", rank),
        TIMEOUT,
    )


def steps(
    rank: int, tp_size: int, ports: list[int], arguments: argparse.Namespace, custom: bool
) -> list[dict]:
    """One row per shape and batch size."""
    rows = []
    device = torch.device("cuda", rank)
    settings = engine_settings(
        parallelism=Parallelism(tp_size),
        max_batch_size=max(BATCHES),
        max_tokens=8192,
        enable_custom_all_reduce=custom,
    )
    prepare_process(settings, device)
    for name, port in zip(arguments.shapes, ports, strict=True):
        if name in LARGE and tp_size == 1:
            continue
        weights = random_weights(CONFIGS[name], Parallelism(tp_size), rank)
        communicator = join(rank, tp_size, port)
        with torch.inference_mode():
            runner = assemble_runner(weights, settings, communicator, device)
        encoder = runner.decoder.encode_step
        source = 0 if encoder is None else CONTEXT
        passes = () if encoder is None else SOURCES
        times = {f"encode_{tokens}_ms": encode_ms(runner, tokens) for tokens in passes}
        rows += [
            {
                "model": name,
                "tp_size": tp_size,
                "enable_custom_all_reduce": custom,
                "rows": count,
                "context": CONTEXT,
                "rank_bytes": weights.bytes(),
                "ms_per_step": step_ms(runner, count, CONTEXT, source),
                **times,
            }
            for count in BATCHES
        ]
        runner.close()
        del runner, weights
        release()
    return rows


if __name__ == "__main__":
    sys.exit(main())
