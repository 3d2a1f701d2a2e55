"""A report and a policy make a verdict: may the served model go live?

Every bound of the policy becomes a check (evaluation/checks.py), and every check a reason. A
bound has failed when the whole interval lies beyond it, has passed when the whole interval lies
within, and is open otherwise. One that failed makes NO-GO, else one that is open INCONCLUSIVE.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher_scripts.common.errors import ServerError, problem
from launcher_scripts.common.files import CHAIN, replica_files, request_publication
from launcher_scripts.common.packages import VERDICTS
from launcher_scripts.config.options import is_same_path
from launcher_scripts.config.policy import PolicySettings
from launcher_scripts.config.settings import EvaluateSettings
from launcher_scripts.evaluation.checks import FINDINGS, Check, checks
from launcher_scripts.evaluation.tasks.task import COUNTED, Interval

FAIL, INCONCLUSIVE, PASS = LEVELS = ("fail", "inconclusive", "pass")
# The verdict is that of the first level that has a reason.
EXIT_CODES = {FAIL: 1, INCONCLUSIVE: 2, PASS: 0}


@dataclass(frozen=True)
class Reason:
    """The outcome of one bound.

    bound:    its key in the policy
    measured: the figure, without its interval; None: not measured
    text:     one sentence
    """

    level: str
    bound: str
    measured: float | None
    limit: float | None
    text: str


@dataclass(frozen=True)
class Verdict:
    """GO, NO-GO or INCONCLUSIVE, with the reasons: failed bounds, open ones, passed ones.

    served: the digests of the weights that were measured; more than one: of different weights
    certificate: the statement of the twin, its test and its faults; None: there is no twin
    """

    verdict: str
    exit_code: int
    reasons: list[Reason]
    policy: dict[str, Any]
    date: str
    served: list[dict[str, Any]]
    certificate: dict[str, Any] | None = None

    def lines(self) -> list[str]:
        """The verdict, and a line a reason."""
        passed = sum(reason.level == PASS for reason in self.reasons)
        head = f"{self.verdict}: {passed} of {len(self.reasons)} bounds hold"
        return [head, *(f"  {reason.level}: {reason.text}" for reason in self.reasons)]


def judge(content: Mapping[str, Any], policy: PolicySettings, folder: Path) -> Verdict:
    """The verdict on a report's content; `folder` holds the files that the report names.

    Raises ConfigError when the baseline cannot be read.
    """
    all_checks = list(checks(content, policy, folder))
    reasons = [reason(check, policy.min_items) for check in all_checks] or [_no_bounds()]
    reasons.sort(key=_order)
    exit_code = EXIT_CODES[reasons[0].level]
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    raw = dataclasses.asdict(policy)
    served = _served(content)
    return Verdict(
        VERDICTS[exit_code], exit_code, reasons, raw, date, served, _certificate(content)
    )


def _certificate(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """The statement of a report's twin."""
    record = (content.get("twin") or {}).get("certificate")
    return record and {name: record[name] for name in ("statement", "test", "faults")}


def _served(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The different digest chains of a report's sections."""
    sections = [*content.get("tasks", {}).values(), *content.values()]
    measured_on = (part.get("measured_on") for part in sections if isinstance(part, dict))
    model: list[dict[str, Any]] = []
    for digests in (on.get("digests", {}) for on in measured_on if on):
        chain = {name: digests.get(name) for name in CHAIN}
        if chain["manifest"] is not None and chain not in model:
            model.append(chain)
    return model


def _order(one: Reason) -> tuple[int, bool]:
    """By level; what a twin has found comes before the figures that it explains."""
    return LEVELS.index(one.level), not one.bound.endswith(FINDINGS)


def reason(check: Check, min_items: int) -> Reason:
    """Return the outcome of a check."""
    bound_text = f"{'at least' if check.at_least else 'at most'} {check.show(check.limit)} is asked"
    measured = check.measured
    if measured is None:
        text = f"{check.what} was not measured; {check.how}"
        return Reason(INCONCLUSIVE, check.bound, None, check.limit, text)
    note = f"; {check.note}" if check.note else ""
    if not isinstance(measured, Interval) or check.by_value:
        value = measured.value if isinstance(measured, Interval) else measured
        broken = INCONCLUSIVE if check.of_measurement else FAIL
        level = PASS if check.holds(value) else broken
        text = f"{check.what} is {check.show(value)}; {bound_text}{note}"
        return Reason(level, check.bound, value, check.limit, text)
    level = _level(check, measured, min_items)
    ends = f"{check.show(measured.low)} to {check.show(measured.high)}"
    text = (
        f"{check.what} is {check.show(measured.value)} (95 % interval {ends}, {measured.items} "
        f"items, {measured.method}); {bound_text}{note}"
    )
    if level == INCONCLUSIVE:
        text += f"; {_items_that_decide(check, measured, min_items)}"
    return Reason(level, check.bound, measured.value, check.limit, text)


def _level(check: Check, measured: Interval, min_items: int) -> str:
    if measured.method not in COUNTED and measured.items < min_items:
        return INCONCLUSIVE
    ends_within = [check.holds(end) for end in (measured.low, measured.high)]
    if all(ends_within):
        return PASS
    return INCONCLUSIVE if any(ends_within) or check.holds(measured.value) else FAIL


def _items_that_decide(check: Check, measured: Interval, min_items: int) -> str:
    if not math.isfinite(measured.high - measured.low):
        return "the report has no interval of it"
    minimum = 1 if measured.method in COUNTED else min_items
    items = measured.items_to_decide(check.limit, minimum)
    if items is None:
        return "the value is so near the bound that no number of items decides it: move the bound"
    return f"it takes about {items:,} items like these to decide it"


def _no_bounds() -> Reason:
    text = (
        "the policy asks nothing of what was measured, so GO means no more than that it could be "
        "measured; evaluate.policy or a reference asks more"
    )
    return Reason(PASS, "", None, None, text)


GO = "GO"
_TIMEOUT_SECONDS = 120.0  # a shared disk may show a new file a minute late
_POLL_SECONDS = 0.2


def promote(settings: EvaluateSettings, verdict: str) -> None:
    """Have the measured server publish its address after GO, and wait until it has.

    Nothing happens after another verdict, or where no server is held back. Raises ServerError when
    the server does not publish: it has ended.
    """
    if settings.published_as is None or settings.server_job_folder is None or verdict != GO:
        return
    folder = settings.server_job_folder
    request_publication(Path(folder))
    files = replica_files(Path(settings.published_as), settings.replicas)
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while late := [path for path in files if not is_same_path(_job_of(path) or "", folder)]:
        if time.monotonic() > deadline:
            raise ServerError(
                problem(
                    f"the server has not published its address within {_TIMEOUT_SECONDS:g} s",
                    got=[str(path) for path in late],
                    change=f"nothing here: the log in {folder} says how the server ended",
                )
            )
        time.sleep(_POLL_SECONDS)
    print(f"published: {', '.join(map(str, files))}", flush=True)


def _job_of(path: Path) -> str | None:
    """The job folder of the server that a ready file names."""
    try:
        folder: str | None = json.loads(path.read_text(encoding="utf-8"))["job"]["folder"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return folder
