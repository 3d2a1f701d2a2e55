"""README's section on performance, docs/performance.md and its figure, from benchmarks/results.

    python3 -m benchmarks.report [--check]

README's section lies between two comments that name this program. --check writes nothing and fails
when a text is not what the results say.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path

from benchmarks import tables
from benchmarks.floors import BETWEEN_NODES, Rates, exchange_of, planned_ms
from benchmarks.recorded import result
from benchmarks.shapes import BATCHES, CONFIGS, GPT_43B, USE_CASES, Case
from launcher_scripts.models.gpt import GPTConfig

ROOT = Path(__file__).resolve().parents[1]
SUMMARY = (USE_CASES["question answering"], BATCHES[-1])
CLIENTS = 128
FIGURE = Path("docs") / "latency.svg"
BEGIN = "<!-- made by python3 -m benchmarks.report -->"
LOADS = ("load", "load-8b")
RUNS = (
    "long-prompts",
    "serve",
    "serve-tp",
    "generate",
    "in-flight",
    *LOADS,
    "gateway",
    "decode",
    "tensor-parallel",
)
CONTENTS = (
    "| question | answer |",
    "|---|---|",
    "| How long does a request take? | [Requests](#requests-through-the-server) |",
    "| How many clients can one server take? | [Requests in flight](#requests-in-flight) |",
    "| How soon does the first token come? "
    "| [Long prompts](#long-prompts), [Streaming](#streaming), [Gateway](#through-the-gateway), "
    "[Start](#start) |",
    "| How close are the kernels to the hardware? | [Decode steps](#decode-steps) |",
    "| What do weights in bytes and more GPUs bring? "
    "| [int8, fp8](#weights-in-bytes), [NVLink](#tensor-parallelism-over-nvlink) |",
    "| How is all of this measured? | [Method](#how-it-is-measured) |",
)
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


def rows_by_gpus() -> list[dict]:
    """The rows of the run on several GPUs, and of the one on one GPU what is missing there."""
    rows = [*result("serve")["rows"], *result("serve-tp")["rows"]]
    return list({(row["model"], row["tp_size"], Case.of(row)): row for row in rows}.values())


def mark(name: str) -> str:
    """What refers to the footnote of the run called `name`, where there is one."""
    return f"[^{name}]" if "note" in result(name) else ""


def footnote(name: str) -> list[str]:
    """What has to be known of the run called `name`, where there is something."""
    report = result(name)
    text = f"[^{name}]: {report.get('note')}"
    return [prose(text, indent="    ")] if "note" in report else []


def with_section(text: str, paragraphs: list[str]) -> str:
    """The text with these paragraphs between BEGIN and END."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the text has no {BEGIN} with {END} behind it")
    return "\n\n".join([before + begin, *paragraphs, end + after])


def summary() -> list[str]:
    """README's: the headline, and where the rest is."""
    return [
        joined(headline()),
        "The peers run without a server. All figures: [docs/performance.md](docs/performance.md).",
    ]


def headline() -> list[str]:
    """What most readers want to know, a line each."""
    one, batch = (
        next(
            row for row in result("serve")["rows"] if row["model"] == "5b" and Case.of(row) == case
        )
        for case in SUMMARY
    )
    small, large = (row for row in result("gateway")["rows"] if row["clients"] == CLIENTS)
    times = [row["tokens_per_s"] / row["vllm"]["tokens_per_s"] for row in (small, large)]
    step = next(row for row in result("decode")["rows"] if row["model"] == "5b")
    long = next(row for row in result("long-prompts")["rows"] if row["load"] == "long-8")
    first, other = long["first_token_ms"], long["vllm"]["first_token_ms"]
    lines = (
        f"A request with {one['input']} tokens in and {one['output']} out takes {one['ms']:.1f} ms"
        f" with GPT 5B: CTranslate2 takes {one['peers']['ctranslate2'] / one['ms']:.1f} times as"
        f" long, transformers {one['peers']['transformers'] / one['ms']:.1f} times.",
        f"A batch of {batch['rows']} gets {batch['tokens_per_s']:,.0f} tokens/s:"
        f" {batch['peers']['ctranslate2'] / batch['ms']:.1f} times CTranslate2's rate,"
        f" {batch['peers']['transformers'] / batch['ms']:.1f} times transformers'.",
        f"{CLIENTS} clients stream {small['tokens_per_s']:,} tokens/s of GPT 1.3B through the"
        f" OpenAI gateway, {times[0]:.2f} times the rate of vLLM's server, and"
        f" {large['tokens_per_s']:,} of an 8B of Llama-3.1's shape, {times[1]:.2f} times.",
        f"{long['clients']} clients with prompts of 20,000 tokens get the first token of an 8B"
        f" after {first['p50']:.0f} ms (p50) and {first['p99']:,.0f} (p99): vLLM's engine takes"
        f" {other['p50']:.0f} and {other['p99']:,.0f}.",
        f"A decode step of one row takes {step['ms']:.2f} ms with GPT 5B. Reading its weights, keys"
        f" and values alone takes {step['share_of_floor']:.0%} of that.",
    )
    bullets = [prose(f"- {line}", indent="  ") for line in lines]
    return ["On one NVIDIA H200, in bfloat16:", "", *bullets]


def performance() -> list[str]:
    """docs/performance.md's paragraphs: the headline first, caveats as footnotes."""
    return [
        "# Performance",
        joined(headline()),
        f"![Latency of a request by model size, and beside peers]({FIGURE.name})",
        joined(CONTENTS),
        *_long_prompts(),
        *_served(),
        *_in_flight(),
        *_streaming(),
        *_gateway(),
        *_loading(),
        *_steps(),
        *_weights_in_bytes(),
        *_tensor_parallel(),
        *_method(),
        *(text for name in RUNS for text in footnote(name)),
    ]


def _method() -> list[str]:
    return [
        "## How it is measured",
        prose(
            "`python3 -m benchmarks.report` makes this page from `benchmarks/results/*-h200.json`.",
            "Those files name the hardware, the versions and the rates measured in each run.",
            "Weights are random bfloat16, decoding is greedy, times are medians. Peers run in the",
            "same run as the figure beside them, or a footnote says when. A peer that is not",
            "installed (`pip install ctranslate2`) is left out, with the reason in the results.",
            "`benchmarks.tune` finds the kernels' tiles for another device.",
        ),
        prose(
            "A **floor** is the least time that the GPU needs: it counts the prompt's operations,",
            "or its bytes, and the bytes that every further token has to read, at the rates of the",
            f"run. Those of the requests through the server: {_rates(result('serve'))}.",
        ),
    ]


def _long_prompts() -> list[str]:
    report = result("long-prompts")
    return [
        "## Long prompts",
        prose(
            "`benchmarks.long_prompts`, an 8B of Llama-3.1's shape, the engine in the clients'",
            f"process. In brackets: vLLM {report['vllm']}, its engine in the clients' process as",
            f"well, on the same machine right after{mark('long-prompts')}.",
        ),
        joined(tables.long_prompts_table(report["rows"])),
    ]


def _served() -> list[str]:
    served, parallel = result("serve")["rows"], result("serve-tp")
    return [
        "## Requests through the server",
        prose(
            "`benchmarks.serve`: milliseconds of a request over gRPC to a tritonserver on the same",
            f"machine{mark('serve')}. transformers and CTranslate2 run without a server; in",
            "brackets, how many times longer they take.",
        ),
        joined(tables.served_table(served)),
        "### On several GPUs",
        prose(
            "The use cases of the NeMo framework's inference guide, one row, on up to 4 GPUs of",
            f"one machine ({_rates(parallel)}){mark('serve-tp')}. What was not measured in that",
            "run is from the one above.",
        ),
        joined(tables.use_case_table(rows_by_gpus())),
        *_planned(),
        "### Without a server",
        f"The same in the engine's own process (`benchmarks.generate`){mark('generate')}.",
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
            "256,000) and runs on 32 GPUs. We did not have these, so this table is planned, not",
            "measured. It counts the bytes that a GPU reads, the operations of the prompt and",
            "the sums that GPUs exchange, two a layer. A sum within a node takes what we measured",
            f"between 4 GPUs. Between nodes we assume {BETWEEN_NODES[0] * 1e6:.0f} µs, and",
            f"{BETWEEN_NODES[1] * 8 / 1e9:.0f} Gbit/s each way (TP 16 and 32, nodes of 8 GPUs).",
            "A short pass takes as long as its sums, so more than one node is slower.",
        ),
        prose(
            f"How good is the plan? For 20B on 1, 2 and 4 GPUs we measured {min(over):.2f} to",
            f"{max(over):.2f} times what it says: it leaves out the server, and kernels miss the",
            "full rates.",
        ),
        joined(tables.plan_table({size: plan(GPT_43B, size) for size in (1, 2, 4, 8, 16, 32)})),
    ]


def plan(config: GPTConfig, tp_size: int) -> dict[Case, float]:
    """Milliseconds of the use cases at the rates of the run on several GPUs."""
    found = result("serve-tp")["rates"]
    rates = Rates(found["read_tb_per_s"] * 1e12, found["matrix_tflops"] * 1e12)
    exchange = exchange_of(tp_size)
    return {case: planned_ms(config, case, rates, tp_size, exchange) for case in USE_CASES.values()}


def _in_flight() -> list[str]:
    report = result("in-flight")
    return [
        "## Requests in flight",
        prose(
            f"`benchmarks.in_flight`, {tables.model_name(report['shape'])}{mark('in-flight')}:",
            "tokens per second; in brackets, how many times as many we give. Requests have 32 to",
            "512 tokens in and 16 to 256 out, uniformly. Each client has one request at a time,",
            "and rows join and leave between steps. Only the time in which all clients are busy",
            "counts.",
        ),
        joined(tables.in_flight_table(report)),
        joined(
            [
                prose(
                    "- **Static batches** are one request of as many rows, answered when its",
                    "longest row ends. Until then all rows go on, or rows leave as they end. No",
                    "row joins.",
                    indent="  ",
                ),
                prose(
                    "- **CTranslate2** gets as many requests at once, without a server. The best",
                    "of three ways counts: one batch, one batch that rows leave, four requests at",
                    "a time.",
                    indent="  ",
                ),
            ]
        ),
        "### Models on four GPUs",
        *(line for shape in ("20b", "70b") for line in _in_flight_on_four(shape)),
    ]


def _in_flight_on_four(shape: str) -> list[str]:
    report = result(f"in-flight-{shape}-tp4")
    config = CONFIGS[shape]
    return [
        prose(
            f"{tables.model_name(shape)} ({config.num_layers} layers of {config.hidden_size:,})",
            f"with TP {report['tp_size']}; the server is ready after",
            f"{report['start_seconds']:.0f} s, its files in the page cache:",
        ),
        joined(tables.in_flight_table(report)),
    ]


def _streaming() -> list[str]:
    return [
        "## Streaming",
        prose(
            "`benchmarks.streaming`: the same mixed requests over one gRPC stream per client, from",
            "8 processes on the same machine. `whole answers` are clients of the same model that",
            "do not stream. A client that is alone gets a response for each token; where many",
            "stream, a response brings several. Memory is that of the server's processes, before",
            "and after. `left after` is the longest time until the server gave up the request of a",
            "client that left.",
        ),
        joined(tables.streaming_table(result("streaming")["rows"])),
    ]


def _gateway() -> list[str]:
    report = result("gateway")
    return [
        "## Through the gateway",
        prose(
            "`benchmarks.gateway`: the same mixed requests to `/v1/completions`, streamed, one",
            "event per token. `tokens per response` are those that arrived together. `whole",
            "answers` are clients of the token model over gRPC, without a gateway. vLLM is",
            f"{report['vllm']} (`benchmarks.vllm_server`); x is the gateway's tokens per second",
            f"over vLLM's{mark('gateway')}.",
        ),
        joined(tables.gateway_table(report["rows"])),
    ]


def _loading() -> list[str]:
    reports = [result(name) for name in LOADS]
    sizes = ", ".join(
        f"{tables.model_name(report['shape'])} ({report['weight_bytes'] / 1e9:.1f} GB)"
        for report in reports
    )
    floors = " and ".join(f"{report['floor_s']:.1f}" for report in reports)
    starts = [start for report in reports for start in report["starts"]]
    rates = [f"{_disk_rate(start):.1f}" for start in starts if "read_from_disk_bytes" in start]
    return [
        "## Start",
        prose(
            f"`benchmarks.load --engine`, {sizes}: from the command to the first token of an",
            f"engine without tritonserver{mark(LOADS[0])}. Copying the bytes to the GPU takes",
            f"{floors} s. Digests of all files are compared while the weights are read. The first",
            "start compiles the kernels; `deploy` keeps them for later ones.",
            *([f"From the disk the weights come at {' and '.join(rates)} GB/s."] if rates else []),
        ),
        joined(tables.load_table(reports)),
    ]


def _disk_rate(start: dict) -> float:
    """GB per second that a start reads from the disk."""
    at = dict(start["timeline_s"])
    seconds = at["rank 0 has its weights"] - at["torch is imported"]
    return float(start["read_from_disk_bytes"] / seconds / 1e9)


def _steps() -> list[str]:
    report = result("decode")
    prompts = [row for row in report["rows"] if "prefill_tokens" in row]
    return [
        "## Decode steps",
        prose(
            f"`benchmarks.decode`: from token to token on the device{mark('decode')}. `-modern`",
            "has rotary positions, RMS norms, gated MLPs and a quarter of the keys. 30B-A3B has",
            "the sizes of Qwen 3's mixture of experts. Of T5, the decoder.",
        ),
        joined(tables.step_table(report["rows"])),
        "Whole requests to T5 in the engine's process, those of a batch at once:",
        joined(tables.whole_request_table(report["rows"])),
        *(
            prose(
                f"A prompt of {row['prefill_tokens']} tokens of the",
                f"{tables.model_name(row['model'])} model takes {row['ms']:.0f} ms,",
                f"{row['share_of_matrix_rate']:.2f} of the rate of a large matrix product.",
            )
            for row in prompts
        ),
    ]


def _weights_in_bytes() -> list[str]:
    report = result("quantized")
    return [
        "## Weights in bytes",
        prose(
            "`benchmarks.decode`: bfloat16 and `quantization` in the same run, milliseconds per",
            "step. In brackets, the share of the read floor, which counts the head and the",
            "embeddings in bfloat16, and how many times as fast as bfloat16 a step is. Accuracy:",
            "[serving.md](serving-options.md#quantized-weights).",
        ),
        joined(tables.quantized_table(report)),
    ]


def _tensor_parallel() -> list[str]:
    report = result("tensor-parallel")
    return [
        "## Tensor parallelism over NVLink",
        prose(
            "`benchmarks.tensor_parallel`: decode steps at context 80. Shared memory is",
            f"`enable_custom_all_reduce`{mark('tensor-parallel')}.",
        ),
        joined(tables.tensor_parallel_table(report["rows"])),
    ]


def _rates(report: dict) -> str:
    rates = report["rates"]
    return (
        f"{rates['read_tb_per_s']:.2f} TB/s read, {rates['matrix_tflops']:.0f} TFLOP/s in a large "
        "matrix product"
    )


def prose(*parts: str, indent: str = "") -> str:
    """A paragraph in lines of the project's width; `indent` is that of all but the first."""
    return textwrap.fill(
        " ".join(parts),
        100,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def joined(lines: list[str]) -> str:
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
