"""README's performance tables and plot from the figures in benchmarks/results.

python3 -m benchmarks.report [--plot docs/latency.svg]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

RESULTS = Path(__file__).with_name("results")
BARS = (
    ("engine_ms", "this engine", "#2a6f97"),
    ("torch_graph", "torch, CUDA graph", "#a9b4c2"),
    ("transformers", "transformers", "#d9a05b"),
)
WIDTH, HEIGHT, LEFT, TOP, BAR = 640, 300, 60, 40, 34
REQUEST = (60, 20)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--plot", type=Path, help="where to draw latency by model size")
    arguments = parser.parse_args(argv)
    requests = load(arguments.results, "generate-h200.json")["rows"]
    steps = load(arguments.results, "decode-h200.json")["rows"]
    served = load(arguments.results, "serve-h200.json")["models"]
    tables = (request_table(requests), step_table(steps), serve_table(served))
    print("\n\n".join("\n".join(table) for table in tables))
    if arguments.plot:
        arguments.plot.write_text(plot(requests), encoding="utf-8")
    return 0


def load(folder: Path, name: str) -> dict:
    return json.loads((folder / name).read_text(encoding="utf-8"))


def request_table(rows: list[dict]) -> list[str]:
    """Whole requests at batch 1 beside their peers."""
    lines = [
        "| model, tokens in/out | this engine, ms | torch in a CUDA graph | transformers | floor |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        peers = (f"{row['peers'].get(name, float('nan')):.1f}" for name, _, _ in BARS[1:])
        name = f"{row['model'].upper()}, {row['input']}/{row['output']}"
        cells = (name, f"{row['engine_ms']:.1f}", *peers, f"{row['floor_ms']:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def step_table(rows: list[dict]) -> list[str]:
    """Single decode steps: milliseconds and share of the floor."""
    cases = sorted({_case(row) for row in rows if "floor_ms" in row})
    lines = [
        "| ms per step (share of the read floor) | " + " | ".join(map(_title, cases)) + " |",
        "|---" * (len(cases) + 1) + "|",
    ]
    for model in dict.fromkeys(row["model"] for row in rows):
        cells = []
        for case in cases:
            found = [row for row in rows if row["model"] == model and _case(row) == case]
            cells += [f"{row['ms']:.3f} ({row['share_of_floor']:.0%})" for row in found] or [""]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return lines


def serve_table(models: list[dict]) -> list[str]:
    """Tokens per second through tritonserver, by requests in flight."""
    lines = [
        "| model | requests in flight | tokens/s | static batches of as many | ratio |",
        "|---|---|---|---|---|",
    ]
    for model in models:
        for row in model["rows"]:
            speeds = (f"{row[f'{way}_tokens_per_s']:,.0f}" for way in ("in_flight", "static"))
            cells = (model["shape"].upper(), str(row["clients"]), *speeds, f"{row['ratio']:.2f}")
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _case(row: dict) -> tuple[int, int, int]:
    if "floor_ms" not in row:
        return (0, 0, 0)
    return (row["rows"], row["context"], row.get("source", 0))


def _title(case: tuple[int, int, int]) -> str:
    rows, context, source = case
    return f"batch {rows}, context {context}" + (f", source {source}" if source else "")


def plot(rows: list[dict]) -> str:
    """Bars of a request's latency by model, as SVG."""
    chosen = [row for row in rows if (row["input"], row["output"]) == REQUEST]
    values = [
        [row["engine_ms"], *(row["peers"].get(name, 0) for name, _, _ in BARS[1:])]
        for row in chosen
    ]
    most = max(max(group) for group in values)
    scale = (HEIGHT - TOP - 40) / most
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        f'<text x="{LEFT}" y="16">Milliseconds for {REQUEST[0]} tokens in and {REQUEST[1]} out, '
        "batch 1, bfloat16, one H200</text>",
    ]
    for index, (_, label, colour) in enumerate(BARS):
        x = LEFT + 170 * index
        parts.append(f'<rect x="{x}" y="22" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 14}" y="31">{label}</text>')
    for group, row in enumerate(chosen):
        x = LEFT + group * (len(BARS) * BAR + 36)
        for index, value in enumerate(values[group]):
            height = value * scale
            y = HEIGHT - 24 - height
            fill = BARS[index][2]
            parts.append(
                f'<rect x="{x + index * BAR}" y="{y:.1f}" width="{BAR - 4}" '
                f'height="{height:.1f}" fill="{fill}"/>'
            )
            parts.append(f'<text x="{x + index * BAR}" y="{y - 3:.1f}">{value:.0f}</text>')
        parts.append(f'<text x="{x}" y="{HEIGHT - 8}">{row["model"].upper()}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
