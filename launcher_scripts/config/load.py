"""A load test: who asks how much at once, in the block `evaluate.load`."""

from __future__ import annotations

from dataclasses import dataclass, field

from launcher_scripts.common.errors import ConfigError, Problems
from launcher_scripts.config.options import check_options, option
from launcher_scripts.config.paths import ConfigPath

PATHS = ("gateway", "grpc", "http")
GENERATORS = ("builtin", "guidellm")
_KEY = "evaluate.load.{}"


@dataclass(frozen=True)
class LoadPrompts:
    """What is asked. Lengths are in tokens.

    data_file: prompts to take in turn: JSON lines with `text` or `prompt`, or a text a line; None:
               random token ids
    spread:    lengths are uniform between (1 - spread) and (1 + spread) times input and output
    """

    data_file: ConfigPath | None = None
    input: int = option(128, "tokens of a prompt; with data_file, the most", least=1)
    output: int = option(64, "tokens that each request generates", least=1)
    spread: float = 0.0

    def __post_init__(self) -> None:
        problems = Problems("the prompts of the load test")
        check_options(self, problems, _KEY.format("prompts.{}").format)
        if not 0 <= self.spread < 1:
            problems.add(
                "spread must be at least 0 and below 1",
                got=self.spread,
                change=_KEY.format("prompts.spread"),
            )
        problems.raise_if_any(ConfigError)


@dataclass(frozen=True)
class LoadBounds:
    """What a request must keep to count as goodput, in milliseconds; None: anything.

    between_tokens_ms: from one token to the next, on average over the answer
    """

    first_token_ms: float | None = None
    between_tokens_ms: float | None = None
    latency_ms: float | None = None

    @property
    def asked(self) -> bool:
        return (self.first_token_ms, self.between_tokens_ms, self.latency_ms) != (None, None, None)


@dataclass(frozen=True)
class LoadSettings:
    """One run for every path with every number of clients, every rate and the trace.

    paths:        how the model is asked: the gateway's completions, Triton's gRPC, Triton's HTTP
    clients:      closed loop: so many clients, each of which waits for its answer
    rates:        open loop: so many requests per second, with Poisson arrivals
    trace_file:   open loop: JSON lines with timestamp (ms), input_length and output_length
    requests, seconds: how long a run counts: so many requests, or so much time; one of them
    warmup:       seconds of the same load before that
    gateway:      its address, http://host:port/v1; None: that of the ready file
    api_key_file: a file that holds the gateway's key and nothing else
    stream:       of the gateway; Triton's paths stream where the model was exported decoupled
    generator:    who asks the gateway; guidellm is a command of its own (requirements/load.txt)
    processes:    client processes; more where the client is the bottleneck
    time_limit:   seconds for the whole test; what does not fit is an error
    """

    paths: tuple[str, ...] = PATHS[:1]
    clients: tuple[int, ...] = (1, 8)
    rates: tuple[float, ...] = ()
    trace_file: ConfigPath | None = None
    requests: int | None = option(None, "requests of a run", least=1)
    seconds: float | None = option(30.0, "seconds of a run", least=1)
    warmup: float = option(2.0, "seconds of warm-up, which do not count", least=0)
    prompts: LoadPrompts = field(default_factory=LoadPrompts)
    stream: bool = True
    bounds: LoadBounds = field(default_factory=LoadBounds)
    find_saturation: bool = False
    saturation_runs: int = option(12, "most runs of the search", least=2)
    gateway: str | None = None
    api_key_file: ConfigPath | None = None
    generator: str = option("builtin", "load generator", choices=GENERATORS)
    processes: int = option(1, "processes that send the requests", least=1)
    seed: int = option(0, "random seed of prompts and arrivals", least=0)
    time_limit: float = option(3600.0, "seconds that the whole test may take", least=1)

    def __post_init__(self) -> None:
        problems = Problems("the load test")
        check_options(self, problems, _KEY.format)
        for path in self.paths:
            problems.check_choice("path", path, PATHS, _KEY.format("paths"))
        if not self.paths or len(set(self.paths)) < len(self.paths):
            problems.add(
                "paths must hold each path once",
                got=list(self.paths),
                choices=PATHS,
                change=_KEY.format("paths"),
            )
        for name in ("clients", "rates"):
            if any(value <= 0 for value in getattr(self, name)):
                problems.add(
                    f"{name} must be above 0",
                    got=list(getattr(self, name)),
                    change=_KEY.format(name),
                )
        if not (self.clients or self.rates or self.trace_file):
            problems.add("no load is asked for", change=_KEY.format("clients, rates or trace_file"))
        if (self.requests is None) == (self.seconds is None):
            problems.add(
                "a run ends after requests or after seconds: one of them is null",
                got=(self.requests, self.seconds),
                change=_KEY.format("requests or seconds"),
            )
        if self.find_saturation and not (self.clients or self.rates):
            problems.add(
                "saturation is found by clients or rates",
                got=self.trace_file,
                change=_KEY.format("clients or rates"),
            )
        if self.find_saturation and not self.clients and self.seconds is None:
            problems.add(
                "whether a server keeps up with a rate is seen in runs of seconds",
                change=_KEY.format("seconds"),
            )
        if self.generator == "guidellm" and (
            self.requests is None or self.prompts.data_file is None or self.trace_file is not None
        ):
            problems.add(
                "guidellm is given a number of requests and the texts of a file, and no trace",
                change=_KEY.format("generator, requests, prompts.data_file or trace_file"),
            )
        problems.raise_if_any(ConfigError)
