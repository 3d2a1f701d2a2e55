"""Where a server is full: the load from which on more clients or requests bring nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from launcher_scripts.evaluation.load.figures import LoadRun
from launcher_scripts.evaluation.load.plan import Load

# More clients have to bring this much more, or they only wait.
GAIN = 1.05
# Of an open loop's requests, so many have to be answered in the time that they are asked in.
KEEPS_UP = 0.9
# Of the answers, so many have to be within the bounds.
WITHIN = 0.9
# The search ends when the two loads around the answer are this close.
CLOSE = 1.1

Measure = Callable[[Load], LoadRun]


@dataclass(frozen=True)
class Saturation:
    """The largest load that was carried; text says how the search ended."""

    path: str
    requests_per_second: float
    tokens_per_second: float
    clients: int | None
    rate: float | None
    text: str


def find_saturation(measure: Measure, start: Load, most_runs: int) -> Saturation:
    """Double the load until the server does not carry it, then bisect.

    A load is carried when its run is valid, 90 % of its answers keep the bounds and, in an open
    loop, 90 % of the requests of its time are answered in it. In a closed loop the search ends when
    more clients bring less than 5 % more tokens per second.
    """
    carried: LoadRun | None = None
    refused: LoadRun | None = None
    load: Load | None = start
    path = why = ""
    for _ in range(most_runs):
        if load is None:
            break
        run = measure(load)
        path, found = run.path, _objection(run)
        flat = None if carried is None or found else _flat(run, carried)
        if found or flat:
            refused, why = run, found or flat or ""
        else:
            carried = run
        load = None if flat else _next(carried, refused)
    return _saturation(path, carried, refused, why)


def _next(carried: LoadRun | None, refused: LoadRun | None) -> Load | None:
    """The load to try now; None where the two are close enough."""
    if refused is None:
        return None if carried is None else _scaled(carried.load, 2.0)
    if carried is None:
        smaller = _scaled(refused.load, 0.5)
        return None if smaller == refused.load else smaller
    low, high = _size(carried.load), _size(refused.load)
    middle = (low + high) / 2
    if refused.clients is None:
        return None if high / low <= CLOSE else Load(rate=middle)
    near = high - low <= 1 or high / low <= CLOSE
    return None if near else Load(clients=int(middle))


def _scaled(load: Load, factor: float) -> Load:
    if load.clients is not None:
        return Load(clients=max(1, int(load.clients * factor)))
    return Load(rate=_size(load) * factor)


def _size(load: Load) -> float:
    return float(load.clients or load.rate or 0)


def _objection(run: LoadRun) -> str | None:
    """Why the server does not carry a load; None: it does."""
    if not run.valid:
        return f"that run is invalid ({'; '.join(run.invalid_reasons)})"
    if run.goodput is not None and run.goodput < WITHIN * run.requests_per_second:
        return (
            f"there {run.goodput:.2f} of {run.requests_per_second:.2f} answers per second keep "
            "the bounds"
        )
    answered = run.requests_per_second * run.seconds
    if run.rate is not None and answered < KEEPS_UP * run.requests:
        return f"there {answered:.0f} requests are answered while {run.requests} are asked"
    return None


def _flat(run: LoadRun, carried: LoadRun) -> str | None:
    """That more clients bring no more; None: they do."""
    gain = run.tokens_per_second / max(carried.tokens_per_second, 1e-9)
    if run.clients is None or gain >= GAIN:
        return None
    return f"there tokens per second change by {gain - 1:+.1%}"


def _saturation(
    path: str, carried: LoadRun | None, refused: LoadRun | None, why: str
) -> Saturation:
    many = "" if refused is None else refused.load.text
    if carried is None:
        return Saturation(path, 0.0, 0.0, None, None, f"not even {many} can be carried: {why}")
    if refused is None:
        text = f"more than {carried.load.text}: the last of the runs was carried, too"
    else:
        text = f"{carried.load.text}; {many} are too many: {why}"
    return Saturation(
        path,
        carried.requests_per_second,
        carried.tokens_per_second,
        carried.clients,
        carried.rate,
        text,
    )
