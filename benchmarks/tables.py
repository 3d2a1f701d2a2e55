"""The figures in benchmarks/results as tables of Markdown, a list of lines each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.shapes import USE_CASES, Case
from launcher_scripts.common.quantization import FOUR_BITS, QUANTIZATIONS

PEERS = {
    "torch_graph": "torch in a CUDA graph",
    "ctranslate2": "CTranslate2",
    "transformers": "transformers",
}
NAMES = {"t5-base": "T5-base", "t5-3b": "T5-3B", "gpt-oss-20b": "gpt-oss-20b"}


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def model_name(name: str) -> str:
    return NAMES.get(name, name.upper().replace("-MODERN", "-modern"))


def served_table(rows: list[dict]) -> list[str]:
    """Whole requests through the server, and how many times longer the peers took."""
    peers = ("ctranslate2", "transformers")
    header = ["model", "rows x tokens in/out", "ms", "tokens/s", *map(_peer_ms, peers), "floor, ms"]
    return table(header, (_served_cells(row, peers) for row in rows if row["tp_size"] == 1))


def _served_cells(row: dict, peers: Iterable[str]) -> list[str]:
    return [
        model_name(row["model"]),
        f"{row['rows']} x {row['input']}/{row['output']}",
        f"{row['ms']:.1f}",
        f"{row['tokens_per_s']:,.0f}",
        *(_beside(row["peers"].get(peer), row["ms"]) for peer in peers),
        f"{row['floor_ms']:.1f}",
    ]


def _peer_ms(peer: str) -> str:
    return f"{PEERS[peer]}, ms"


def _beside(peer_ms: float | None, ms: float) -> str:
    return "-" if peer_ms is None else f"{peer_ms:.1f} ({peer_ms / ms:.1f}x)"


def use_case_table(rows: list[dict]) -> list[str]:
    """The use cases of the NeMo framework's inference guide, by number of GPUs."""
    sizes = sorted({row["tp_size"] for row in rows})
    header = ["model", "use case", "tokens in", "tokens out", *(_gpus(size) for size in sizes)]
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        for use_case, case in USE_CASES.items():
            found = {
                row["tp_size"]: row
                for row in rows
                if row["model"] == model and Case.of(row) == case
            }
            cells = [model_name(model), use_case, str(case.input), str(case.output)]
            lines.append([*cells, *(_share(found.get(size)) for size in sizes)])
    return table(header, lines)


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' if count > 1 else ''} (TP {count}), ms"


def _share(row: dict | None) -> str:
    return "-" if row is None else f"{row['ms']:.1f}"


def plan_table(plans: dict[int, dict[Case, float]]) -> list[str]:
    """Planned milliseconds of the use cases, by number of GPUs."""
    header = ["use case", "tokens in", "tokens out", *(f"TP {size}, ms" for size in plans)]
    rows = (
        [name, str(case.input), str(case.output), *(f"{plan[case]:.0f}" for plan in plans.values())]
        for name, case in USE_CASES.items()
    )
    return table(header, rows)


def request_table(rows: list[dict]) -> list[str]:
    """Whole requests in the engine's own process, at batch 1."""
    peers = ("torch_graph", "transformers")
    header = ["model, tokens in/out", "engine, ms", *map(_peer_ms, peers), "floor, ms"]
    lines = []
    for row in rows:
        name = f"{model_name(row['model'])}, {row['input']}/{row['output']}"
        times = [_beside(row["peers"].get(peer), row["engine_ms"]) for peer in peers]
        lines.append([name, f"{row['engine_ms']:.1f}", *times, f"{row['floor_ms']:.1f}"])
    return table(header, lines)


def step_table(rows: list[dict]) -> list[str]:
    """Single decode steps: milliseconds and share of the floor."""
    steps = [row for row in rows if "floor_ms" in row]
    cases = sorted({_case(row) for row in steps})
    lines = []
    for model in dict.fromkeys(row["model"] for row in steps):
        cells = [model_name(model)]
        for case in cases:
            found = [row for row in steps if row["model"] == model and _case(row) == case]
            cells += [f"{row['ms']:.3f} ({row['share_of_floor']:.0%})" for row in found] or [""]
        lines.append(cells)
    return table(["ms per step (share of the read floor)", *map(_title, cases)], lines)


def whole_request_table(rows: list[dict]) -> list[str]:
    """Requests in the engine's process, beside the floor of their decode steps alone."""
    steps = [row for row in rows if "source" in row and "floor_ms" in row]
    floors = {(row["model"], row["rows"]): row["floor_ms"] for row in steps}
    lines = []
    for row in rows:
        if "engine_ms" not in row:
            continue
        floor = floors.get((row["model"], row["rows"]))
        known = floor is not None and isinstance(row["input"], int)
        cells = [model_name(row["model"]), f"{row['rows']} x {row['input']}/{row['output']}"]
        cells += [f"{row['engine_ms']:.1f}", f"{row['output'] * floor:.1f}" if known else ""]
        lines.append(cells)
    return table(["model", "rows x tokens in/out", "ms", "floor of the steps, ms"], lines)


def _case(row: dict) -> tuple[int, int, int]:
    return (row["rows"], row["context"], row.get("source", 0))


def _title(case: tuple[int, int, int]) -> str:
    rows, context, source = case
    return f"batch {rows}, context {context}" + (f", source {source}" if source else "")


_IN_BYTES = [kind for kind in QUANTIZATIONS if kind not in FOUR_BITS]


def quantized_table(report: dict) -> list[str]:
    """Steps with weights in bytes beside those of the same model with whole ones."""
    sizes = report["weight_bytes"]
    lines = []
    for run in report["runs"]:
        found = {(row["model"], _case(row)): row for row in run["rows"]}
        for (model, case), whole in found.items():
            small = [found.get((f"{model}-{kind}", case)) for kind in _IN_BYTES]
            if any(small):
                memory = f"{sizes[model] / 1e9:.1f}, {sizes[f'{model}-int8'] / 1e9:.1f}"
                name = f"{model_name(model)}, {_title(case)}"
                cells = (_quantized_cell(row, whole) for row in small)
                own = f"{whole['ms']:.3f} ({whole['share_of_floor']:.0%})"
                lines.append([name, memory, own, *cells])
    kinds = (f"{kind}, ms" for kind in ("bf16", *_IN_BYTES))
    return table(["model", "weights, GB, bf16 and in bytes", *kinds], lines)


def _quantized_cell(row: dict | None, full: dict) -> str:
    if row is None:
        return "-"
    faster = full["ms"] / row["ms"]
    return f"{row['ms']:.3f} ({row['share_of_floor']:.0%}, {faster:.2f}x)"


def tensor_parallel_table(rows: list[dict]) -> list[str]:
    """Decode steps by GPUs and the way of their sums; in brackets against one GPU."""
    counts = sorted({row["rows"] for row in rows})
    steps: dict[tuple, dict[int, str]] = {}
    for row in rows:
        speedup = f" ({row['speedup']:.2f}x)" if "speedup" in row and row["tp_size"] > 1 else ""
        way = (row["model"], row["tp_size"], row["enable_custom_all_reduce"])
        steps.setdefault(way, {})[row["rows"]] = f"{row['ms_per_step']:.2f}{speedup}"
    lines = []
    for (model, size, custom), cells in sorted(steps.items(), key=lambda way: str(way[0][0])):
        how = ", shared memory" if custom else ", NCCL"
        gpus = "1" if size == 1 else f"{size}{how}"
        lines.append([model_name(model), gpus, *(cells[count] for count in counts)])
    return table(["model", "GPUs", *(f"batch {count}, ms" for count in counts)], lines)


def in_flight_table(report: dict) -> list[str]:
    """Tokens per second by requests in flight, beside the ways that were measured with them."""
    ways = {
        "static batches": lambda row: row.get("static_tokens_per_s"),
        "static, rows leave": lambda row: row.get("leaving_tokens_per_s"),
        PEERS["ctranslate2"]: lambda row: max(row["peer_tokens_per_s"].values(), default=None),
    }
    known = {name: way for name, way in ways.items() if any(map(way, report["rows"]))}
    lines = []
    for row in report["rows"]:
        speed = row["in_flight_tokens_per_s"]
        others = (way(row) for way in known.values())
        cells = (f"{other:,.0f} ({speed / other:.2f}x)" if other else "-" for other in others)
        lines.append([str(row["clients"]), f"{speed:,.0f}", *cells])
    names = (f"{name}, tokens/s" for name in known)
    return table(["requests in flight", "tokens/s", *names], lines)


def streaming_table(rows: list[dict]) -> list[str]:
    """Times of tokens and tokens per second by streaming clients."""
    header = ["model", "clients", "first token p50 / p99, ms", "between responses p50 / p99, ms"]
    header += ["tokens per response", "tokens/s", "whole answers, tokens/s", "memory, MiB"]
    lines = []
    for row in rows:
        whole = f"{row['whole_answers_tokens_per_s']:,} ({row['ratio']:.2f}x)"
        times = (row["first_token_ms"], row["between_responses_ms"])
        cells = [model_name(row["model"]), str(row["clients"])]
        cells += [f"{each['p50']:.1f} / {each['p99']:.1f}" for each in times]
        cells += [f"{row['tokens_per_response']:.1f}", f"{row['tokens_per_s']:,}", whole]
        cells += ["{} -> {}".format(*row["memory_mib"]), f"{max(row['cancelled_ms']):.0f}"]
        lines.append(cells)
    return table([*header, "left after, ms"], lines)


def gateway_table(rows: list[dict]) -> list[str]:
    """Times of tokens and tokens per second through the gateway, beside vLLM's."""
    header = ["model", "clients", "first token p50 / p99, ms", "tokens per response", "tokens/s"]
    header += ["whole answers, tokens/s", "cores of the gateway", "vLLM: first token, ms"]
    lines = []
    for row in rows:
        peer = row.get("vllm")
        cells = [model_name(row["model"]), str(row["clients"])]
        cells += ["{p50:.1f} / {p99:.1f}".format(**row["first_token_ms"])]
        cells += [f"{row['tokens_per_response']:.1f}", f"{row['tokens_per_s']:,}"]
        cells += [f"{row['whole_answers_tokens_per_s']:,} ({row['ratio']:.2f}x)"]
        cells += [f"{row['gateway_cores']:.2f}"]
        if peer is None:
            lines.append([*cells, "-", "-"])
            continue
        cells += ["{p50:.1f} / {p99:.1f}".format(**peer["first_token_ms"])]
        ratio = row["tokens_per_s"] / peer["tokens_per_s"]
        lines.append([*cells, f"{peer['tokens_per_s']:,} ({ratio:.2f}x)"])
    return table([*header, "tokens/s"], lines)


def long_prompts_table(rows: list[dict]) -> list[str]:
    """First tokens, times between tokens and rates under long prompts; vLLM's in brackets."""
    header = ["clients", "tokens in", "out", "first token p50 / p99, ms"]
    header += ["between tokens p50 / p99, ms", "tokens/s", "prompt tokens/s"]
    lines = []
    for row in rows:
        cells = [str(row["clients"])]
        cells += [
            "-".join(f"{each:,}" for each in sorted({*row[k]})) for k in ("inputs", "outputs")
        ]
        for name in ("first_token_ms", "between_tokens_ms"):
            times = [row, row["vllm"]] if "vllm" in row else [row]
            own, *peer = (f"{each[name]['p50']:,.0f} / {each[name]['p99']:,.0f}" for each in times)
            cells.append(own + "".join(f" ({each})" for each in peer))
        for name in ("tokens_per_s", "prompt_tokens_per_s"):
            peer = [f" ({row['vllm'][name]:,})"] if "vllm" in row else []
            cells.append(f"{row[name]:,}" + "".join(peer))
        lines.append(cells)
    return table(header, lines)


def load_table(reports: Sequence[dict]) -> list[str]:
    """Seconds from the command to what was done: of each model the first start, the fastest later
    one, and the one whose files were not in the page cache, where there is one."""
    header, done = ["seconds from the command"], []
    for report in reports:
        first, *later = report["starts"]
        cold = [start for start in later if "read_from_disk_bytes" in start]
        cached = [start for start in later if start not in cold]
        fastest = min(cached, key=lambda start: start["first_token_s"])
        kinds = ("no kernel compiled yet", "later", "later, files not in the page cache")
        for kind, start in zip(kinds, [first, fastest, *cold], strict=False):
            header.append(f"{model_name(report['shape'])}, {kind}")
            done.append(dict(start["timeline_s"]))
    steps = sorted(done[0], key=done[0].__getitem__)
    cells = ([step, *(_seconds(times.get(step)) for times in done)] for step in steps)
    return table(header, cells)


def _seconds(at: float | None) -> str:
    """Nothing where a start did without the step; two clocks may differ by a little."""
    return "" if at is None else f"{max(0.0, at):.2f}"
