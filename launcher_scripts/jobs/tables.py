"""Jobs as tables: with colours in a terminal, as plain columns in a pipe or a file."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from launcher_scripts.common.rendering import align
from launcher_scripts.jobs.status import Status

if TYPE_CHECKING:
    from rich.table import Table

LIST_COLUMNS = (
    "JOB",
    "RUN",
    "ID",
    "CLUSTER",
    "STATE",
    "NODES",
    "TIME",
    "EXIT",
    "REASON",
    "VERDICT",
)
STATUS_COLUMNS = (
    *("JOB", "RUN", "ID", "STATE", "NODES", "TIME"),
    *("HTTP", "GRPC", "OPENAI", "GPU", "KV", "ROWS", "REQUESTS", "REASON", "VERDICT"),
)
_COLOURS = {
    **dict.fromkeys(("READY", "COMPLETED"), "green"),
    **dict.fromkeys(("RUNNING", "STARTING", "COMPLETING", "CANDIDATE"), "cyan"),
    **dict.fromkeys(("PENDING", "CONFIGURING", "UNKNOWN", "FORGOTTEN"), "yellow"),
    "CANCELLED": "magenta",
}


def cells(status: Status, columns: Sequence[str]) -> list[str]:
    """The texts of one row."""
    state, endpoints, load = status.state, status.endpoints, status.load
    texts = {
        "JOB": status.job.name,
        "RUN": status.job.run,
        "ID": status.job_id,
        "CLUSTER": status.job.record.cluster_type,
        "STATE": status.word,
        "NODES": state.nodes,
        "TIME": "" if state.seconds is None else str(timedelta(seconds=state.seconds)),
        "EXIT": "" if state.exit_code is None else str(state.exit_code),
        "HTTP": endpoints.get("http", ""),
        "GRPC": endpoints.get("grpc", ""),
        "OPENAI": endpoints.get("openai", ""),
        "GPU": load.gpu_text(),
        "KV": load.kv_text(),
        "ROWS": load.rows_text(),
        "REQUESTS": "" if load.requests is None else str(load.requests),
        "REASON": status.reason,
        "VERDICT": "" if status.badge is None else status.badge.text(),
    }
    return [texts[column] for column in columns]


def plain(statuses: Sequence[Status], columns: Sequence[str]) -> str:
    """Columns of equal width, for pipes: one job per line, `-` for nothing."""
    rows = [list(columns), *([text or "-" for text in cells(s, columns)] for s in statuses)]
    return align(rows, left=True)


def coloured(statuses: Sequence[Status], columns: Sequence[str]) -> Table:
    """The same for a terminal; columns that say nothing are left out."""
    from rich.table import Table
    from rich.text import Text

    rows = [cells(status, columns) for status in statuses]
    used = [n for n, column in enumerate(columns) if any(r[n] for r in rows) or column == "STATE"]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number in used:
        table.add_column(columns[number], overflow="fold")
    for status, row in zip(statuses, rows, strict=True):
        colour = _COLOURS.get(status.word, "red")
        table.add_row(*(Text(row[n], style=colour if columns[n] == "STATE" else "") for n in used))
    return table
