"""README's section on performance, docs/performance.md and its figure, from benchmarks/results.

    python3 -m benchmarks.report [--check]

README's section lies between two comments that name this program. --check writes nothing and fails
when a text is not what the results say.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path

from benchmarks import tables
from benchmarks.floors import Rates, between_nodes, planned_ms, within_node
from benchmarks.shapes import BATCHES, CONFIGS, GPT_43B, USE_CASES, Case
from launcher_scripts.models.gpt import GPTConfig

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SUMMARY = (USE_CASES["question answering"], BATCHES[-1])
GPUS_OF_NODE = 8
BETWEEN_NODES = (30e-6, 50e9)  # seconds of a small sum, bytes per second: assumed
FIGURE = Path("docs") / "latency.svg"
BEGIN = "<!-- made by python3 -m benchmarks.report -->"
END = "<!-- end of what benchmarks.report makes -->"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where a text is old"
    )
    arguments = parser.parse_args(argv)
    new = texts()
    if arguments.check:
        stale = [path.name for path, text in new.items() if path.read_text("utf-8") != text]
        print("\n".join(stale))
        return int(bool(stale))
    for path, text in new.items():
        path.write_text(text, encoding="utf-8")
    draw_figure()
    return 0


def texts() -> dict[Path, str]:
    """The texts that are made, as they should be."""
    readme = ROOT / "README.md"
    return {
        readme: with_section(readme.read_text("utf-8"), summary()),
        ROOT / "docs" / "performance.md": "\n\n".join(performance()) + "\n",
    }


def draw_figure() -> None:
    # Where only texts are checked no matplotlib is needed.
    from benchmarks.figure import draw

    draw(ROOT / FIGURE, result("serve")["rows"], rows_by_gpus())


def result(name: str) -> dict:
    """What a benchmark found on the H200s."""
    return json.loads((RESULTS / f"{name}-h200.json").read_text(encoding="utf-8"))


def rows_by_gpus() -> list[dict]:
    """The rows of the run on several GPUs, and of the one on one GPU what is missing there."""
    rows = [*result("serve")["rows"], *result("serve-tp")["rows"]]
    return list({(row["model"], row["tp_size"], Case.of(row)): row for row in rows}.values())


def notes(report: dict) -> list[str]:
    """What has to be known of a run, where there is something."""
    return [prose(report["note"])] if "note" in report else []


def with_section(text: str, paragraphs: list[str]) -> str:
    """The text with these paragraphs between BEGIN and END."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the text has no {BEGIN} with {END} behind it")
    return "\n\n".join([before + begin, *paragraphs, end + after])


def summary() -> list[str]:
    """README's: the figure, some requests through the server, and requests in flight."""
    rows = [row for row in result("serve")["rows"] if Case.of(row) in SUMMARY]
    return [
        f"![Latency of a request by model size, and beside peers]({FIGURE.as_posix()})",
        prose(
            "Whole requests through tritonserver (gRPC, greedy) on one NVIDIA H200 in bfloat16;",
            "peers without a server (and how many times longer they took). A floor is the least",
            "time in which the GPU can compute the prompt and read the bytes that the tokens need.",
        ),
        *notes(result("serve")),
        joined(tables.served_table(rows)),
        prose(
            "Tokens per second of the 1.3B model, mixed requests (32 to 512 tokens in, 16 to 256",
            "out; and how many times as many we give). A static batch is as many requests at once,",
            "none of which joins later: all rows go on until the longest has ended, or leave.",
        ),
        *_in_flight_table(),
        "More figures, and how they are measured: [docs/performance.md](docs/performance.md).",
    ]


def performance() -> list[str]:
    """docs/performance.md's paragraphs."""
    return [
        "# Performance",
        prose(
            "Made by `python3 -m benchmarks.report` from `benchmarks/results/*-h200.json`, which",
            "name hardware, versions and the rates measured in each run. Weights are random",
            "bfloat16, decoding is greedy, times are medians. Peers run in the same run as the",
            "figure beside which they stand, or a note says when; one that is not installed (`pip",
            "install ctranslate2`) is left out, with the reason in the results. `benchmarks.tune`",
            "finds the kernels' tiles for another device.",
        ),
        *_served(),
        *_in_flight(),
        *_streaming(),
        *_loading(),
        *_steps(),
        *_int8(),
        *_tensor_parallel(),
    ]


def _served() -> list[str]:
    served, parallel = result("serve")["rows"], result("serve-tp")
    return [
        "## Requests through the server",
        f"![Latency]({FIGURE.name})",
        prose(
            "`benchmarks.serve`: milliseconds of a request over gRPC to a tritonserver on the same",
            "machine; transformers and CTranslate2 without a server (and how many times longer",
            f"they took). Rates of the run: {_rates(result('serve'))}. A floor counts the prompt's",
            "operations, or its bytes, and the bytes that every further token has to read.",
        ),
        *notes(result("serve")),
        joined(tables.served_table(served)),
        prose(
            "The use cases of the NeMo framework's inference guide, one row, on up to 4 GPUs of",
            f"one machine ({_rates(parallel)}; what is missing there is of the run above).",
        ),
        *notes(parallel),
        joined(tables.use_case_table(rows_by_gpus())),
        *_planned(),
        "The same in the engine's own process, without a server (`benchmarks.generate`).",
        *notes(result("generate")),
        joined(tables.request_table(result("generate")["rows"])),
    ]


def _planned() -> list[str]:
    """The guide's own rows: a model that was not measured, on more GPUs than were there."""
    measured = [row for row in rows_by_gpus() if row["model"] == "20b"]
    cases = USE_CASES.values()
    over = [
        row["ms"] / plan(CONFIGS["20b"], row["tp_size"])[Case.of(row)]
        for row in measured
        if Case.of(row) in cases
    ]
    return [
        prose(
            "The guide's own model has 43 billion weights (48 layers of 8,192, a vocabulary of",
            "256,000) and 32 GPUs, which were not at hand. Planned from the bytes that a GPU has",
            "to read, the operations of the prompt and the sums that the GPUs exchange, two a",
            "layer. Within a node a sum takes what it was measured to take between 4 GPUs. Between",
            f"nodes it is assumed to take {BETWEEN_NODES[0] * 1e6:.0f} µs and its bytes at",
            f"{BETWEEN_NODES[1] * 8 / 1e9:.0f} Gbit/s each way (TP 16 and 32, nodes of 8 GPUs).",
            f"The same plan of 20B is exceeded {min(over):.2f} to {max(over):.2f} times by what",
            "was measured on 1, 2 and 4 GPUs: it leaves out the server and what kernels miss of",
            "the rates. A pass that is short takes as long as its sums, so more than a node is",
            "slower.",
        ),
        joined(tables.plan_table({size: plan(GPT_43B, size) for size in (1, 2, 4, 8, 16, 32)})),
    ]


def plan(config: GPTConfig, tp_size: int) -> dict[Case, float]:
    """Milliseconds of the use cases at the rates of the run on several GPUs."""
    found = result("serve-tp")["rates"]
    rates = Rates(found["read_tb_per_s"] * 1e12, found["matrix_tflops"] * 1e12)
    exchange = between_nodes(*BETWEEN_NODES)
    if tp_size <= GPUS_OF_NODE:
        sums = {
            row["tp_size"]: row["microseconds_by_bytes"]
            for row in result("tensor-parallel")["sums"]
        }
        exchange = within_node(sums[min(max(sums), max(2, tp_size))]["one-shot"])
    return {case: planned_ms(config, case, rates, tp_size, exchange) for case in USE_CASES.values()}


def _in_flight() -> list[str]:
    report = result("in-flight")
    return [
        "## Requests in flight",
        prose(
            f"`benchmarks.in_flight`, {tables.model_name(report['shape'])}: mixed requests, 32 to",
            "512 tokens in and 16 to 256 out, uniformly. Each client has one request at a time and",
            "rows join and leave between steps; counted is a time in which all clients are busy.",
            "A static batch is one request of as many rows, answered when its longest row is;",
            "until then all of its rows go on, or rows leave as they end and none joins.",
            "CTranslate2 gets as many requests at once, without a server, and the best of its ways",
            "counts: one batch, one that rows leave, four at a time. Tokens asked for and answered",
            "per second (and how many times as many we give).",
        ),
        *_in_flight_table(),
    ]


def _in_flight_table() -> list[str]:
    report = result("in-flight")
    return [*notes(report), joined(tables.in_flight_table(report))]


def _streaming() -> list[str]:
    return [
        "## Streaming",
        prose(
            "`benchmarks.streaming`: the same mixed requests over a gRPC stream for each client,",
            "from 8 processes on the same machine, beside clients of the same model that wait for",
            "whole answers. A client that is alone gets a response for each token; where many",
            "stream, a response brings several. Memory is that of the server's processes before",
            "and after each line. The last column is the longest time until the server had given",
            "up the request of a client that left.",
        ),
        joined(tables.streaming_table(result("streaming")["rows"])),
    ]


def _loading() -> list[str]:
    report = result("load")
    seconds = [line["first_token_s"] for line in report["ctranslate2"] if "first_token_s" in line]
    peer = f"CTranslate2 as a process of its own: {', '.join(f'{each:.1f}' for each in seconds)} s."
    size = report["weight_bytes"] / 1e9
    return [
        "## Start",
        prose(
            f"`benchmarks.load`, {tables.model_name(report['shape'])} ({size:.1f} GB, in the page",
            "cache), from the command to the first token; copying the bytes to the GPU takes",
            f"{report['floor_s']:.1f} s.",
            *([peer] if seconds else []),
            "Kernels are compiled by the first start; `deploy` keeps them for later ones.",
        ),
        *notes(report),
        joined(tables.load_table(report)),
    ]


def _steps() -> list[str]:
    report = result("decode")
    (prefill,) = (row for row in report["rows"] if "prefill_tokens" in row)
    return [
        "## Decode steps",
        prose(
            "`benchmarks.decode`: from token to token on the device (`-modern`: rotary positions,",
            "RMS norm, gated MLP, a quarter of the keys; of T5 the decoder).",
        ),
        *notes(report),
        joined(tables.step_table(report["rows"])),
        "Whole requests to T5 in the engine's process, those of a batch at once:",
        joined(tables.whole_request_table(report["rows"])),
        prose(
            f"A prompt of {prefill['prefill_tokens']} tokens of the",
            f"{tables.model_name(prefill['model'])} model takes {prefill['ms']:.0f} ms,",
            f"{prefill['share_of_matrix_rate']:.2f} of the rate of a large matrix product.",
        ),
    ]


def _int8() -> list[str]:
    report = result("int8")
    return [
        "## int8 weights",
        prose(
            "`benchmarks.decode`: `int8_mode` 1 and bfloat16 in the same run, milliseconds per",
            "step (share of the read floor, which counts the head and the embeddings in bfloat16).",
            "What it costs in accuracy stands in [serving.md](serving.md).",
        ),
        joined(tables.int8_table(report)),
    ]


def _tensor_parallel() -> list[str]:
    report = result("tensor-parallel")
    return [
        "## Tensor parallelism over NVLink",
        "`benchmarks.tensor_parallel`: shared memory is `enable_custom_all_reduce`.",
        *notes(report),
        joined(tables.tensor_parallel_table(report["rows"], "20b")),
    ]


def _rates(report: dict) -> str:
    rates = report["rates"]
    return (
        f"{rates['read_tb_per_s']:.2f} TB/s read, {rates['matrix_tflops']:.0f} TFLOP/s in a large "
        "matrix product"
    )


def prose(*parts: str) -> str:
    """A paragraph in lines of the project's width."""
    return textwrap.fill(" ".join(parts), 100, break_long_words=False, break_on_hyphens=False)


def joined(lines: list[str]) -> str:
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
