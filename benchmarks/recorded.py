"""What the benchmarks found on the H200s: the files of benchmarks/results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def result(name: str) -> dict[str, Any]:
    """The content of results/<name>-h200.json."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}-h200.json").read_text(encoding="utf-8"))
    return found
