"""When a served model may go live: the bounds of a gate, as a part of EvaluateSettings.

Shares and drops are fractions (0.02: two of a hundred), times are in milliseconds. None asks
nothing. docs/evaluation.md says how a bound is judged.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from launcher_scripts.common.errors import ConfigError, Problems, problem
from launcher_scripts.config.options import ConfigPath, build, check_options, option

KEY = "evaluate.policy"
# Fields whose values are fractions.
_SHARES = ("max_drop", "min_agreement", "min_top1")


class _Checked:
    """Bounds whose numbers are refused where no figure could meet or miss them."""

    def __post_init__(self) -> None:
        problems = Problems("the bounds of a policy")
        check_options(self, problems, f"{{}} in {KEY}".format)
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            change = f"{field.name} in {KEY}"
            if not math.isfinite(value):
                problems.add(f"{field.name} must be finite", got=value, change=change)
            elif field.name in _SHARES and not 0 <= value <= 1:
                problems.add(f"{field.name} is a fraction, 0 to 1", got=value, change=change)
            elif field.name not in ("min", "max"):
                problems.check_minimum(field.name, value, 0, change)
        problems.raise_if_any(ConfigError)


@dataclass(frozen=True)
class MetricBounds(_Checked):
    """Bounds of one metric. max_drop: from the reference and the baseline, in place of their
    own."""

    min: float | None = None
    max: float | None = None
    max_drop: float | None = None


@dataclass(frozen=True, kw_only=True)
class AgreementBounds(_Checked):
    """Against other answers to the same items.

    max_drop: of every figure, for the worse: of a percentage in points (0.02: from 60 % to 58 %),
              of any other figure as a part of the other's (a perplexity may rise by 2 %)
    min_agreement: items that are answered alike
    max_log_likelihood_difference: of any item, natural logarithm
    """

    max_drop: float | None = None
    min_agreement: float | None = None
    max_log_likelihood_difference: float | None = None


@dataclass(frozen=True, kw_only=True)
class BaselineBounds(AgreementBounds):
    """Against an earlier report. report: the path of its report.json."""

    report: ConfigPath


@dataclass(frozen=True)
class ReferenceBounds(_Checked):
    """Against the original checkpoint on the same tokens.

    max_kl: mean of the items' Kullback-Leibler divergence from the original, in nats a position
    min_top1: mean of the items' share of positions with the same likeliest token
    max_log_likelihood_difference: of any item, natural logarithm
    max_findings: differences with a name, such as a lost BOS
    """

    max_kl: float | None = None
    min_top1: float | None = None
    max_log_likelihood_difference: float | None = None
    max_findings: int | None = None


@dataclass(frozen=True)
class TimeBounds(_Checked):
    """The largest value that is allowed of a time's mean and percentiles, in milliseconds."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


@dataclass(frozen=True, kw_only=True)
class SpeedBounds(_Checked):
    """Bounds of the speed sweep: the slowest row counts for times, the fastest for tokens."""

    max_latency_ms: TimeBounds | None = None
    min_tokens_per_second: float | None = None


@dataclass(frozen=True, kw_only=True)
class LoadBounds(SpeedBounds):
    """Bounds of the load test: the slowest valid run counts for times, the best one for throughput.

    path, clients, rate: the runs that count; None: all of them
    max_failed: requests of all runs together
    max_invalid: runs that say nothing about the server
    """

    path: str | None = option(
        None, "protocol of the measurement", choices=("grpc", "http", "gateway")
    )
    clients: int | None = None
    rate: float | None = None
    max_failed: int | None = None
    max_invalid: int | None = None
    max_first_token_ms: TimeBounds | None = None
    max_between_tokens_ms: TimeBounds | None = None
    min_requests_per_second: float | None = None
    min_goodput: float | None = None


@dataclass(frozen=True, kw_only=True)
class ReportBounds:
    """Bounds of a report, by section.

    metrics, harness: task -> figure -> its bounds
    """

    metrics: Mapping[str, Mapping[str, MetricBounds]] | None = None
    harness: Mapping[str, Mapping[str, MetricBounds]] | None = None
    reference: AgreementBounds | None = None
    baseline: BaselineBounds | None = None
    twin: ReferenceBounds | None = None
    speed: SpeedBounds | None = None
    load: LoadBounds | None = None


DEFAULT_BOUNDS = ReportBounds(
    reference=AgreementBounds(max_drop=0.02),
    twin=ReferenceBounds(max_kl=0.02, min_top1=0.95, max_findings=0),
    load=LoadBounds(max_failed=0, max_invalid=0),
)


@dataclass(frozen=True, kw_only=True)
class PolicySettings(ReportBounds):
    """The bounds of a gate. One on what was not measured leaves the verdict open.

    min_items:   fewer show nothing about a mean or a share
    if_measured: bounds that are left out where nothing was measured
    """

    min_items: int = option(30, "fewest items for a confidence interval", lower=1)
    if_measured: ReportBounds | None = DEFAULT_BOUNDS

    def __post_init__(self) -> None:
        problems = Problems("the policy")
        check_options(self, problems, f"{KEY}.{{}}".format)
        problems.raise_if_any(ConfigError)


def open_policy(policy: str | PolicySettings | None) -> PolicySettings | None:
    """The policy itself, where it is a file's path."""
    return read_policy(Path(policy)) if isinstance(policy, str) else policy


def read_policy(path: Path) -> PolicySettings:
    """The policy in a YAML file; raises ConfigError with every problem."""
    try:
        values: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(problem(f"cannot read the policy {path}: {error}", change=KEY)) from error
    return build(PolicySettings, values, str(path))
