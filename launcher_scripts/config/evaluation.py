"""Settings of an evaluation: tasks, speed sweep, load test, reference model and precisions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import ClassVar

from launcher_scripts.common.errors import ConfigError, Problems
from launcher_scripts.common.packages import ERROR
from launcher_scripts.common.quantization import QUANTIZATIONS
from launcher_scripts.config.options import ConfigPath, SecretPath, check_options, option
from launcher_scripts.config.security import SigningKey

TASK_NAMES = ("lambada", "squad", "boolq_generate", "summarization", "translation", "encode")
# The name of a task in earlier configurations and reports -> its name.
RENAMED_TASKS = {"boolq": "boolq_generate"}


@dataclass(frozen=True)
class GenerationSettings:
    """Generation of a task's answers: prompts from items, and decoding.

    template:      the prompt; {names} in it are the item's fields; None: the task's own
    target_file:   what the answers are compared with, where data_file does not hold it
    max_input_len: the end of a prompt's longest field is cut off; None: nothing is
    prompt_task, ia3_task, lora_adapter: None: none
    source_language, target_language: of a model of several; None: as the checkpoint says
    """

    template: str | None = None
    target_file: ConfigPath | None = None
    output_len: int = option(64, "most tokens to generate", lower=1)
    max_input_len: int | None = option(None, "most tokens of a prompt", lower=1)
    prompt_task: int | None = option(None, "number of a learned prompt", lower=0)
    ia3_task: int | None = option(None, "number of an IA3 adapter", lower=0)
    lora_adapter: int | None = option(None, "number of a LoRA adapter", lower=0)
    source_language: str | None = None
    target_language: str | None = None
    beam_width: int = option(1, "beams", lower=1)
    len_penalty: float = 0.0

    def __post_init__(self) -> None:
        problems = Problems("the generation of an evaluation task")
        check_options(self, problems, "evaluate.tasks.<task>.generation.{}".format)
        problems.raise_if_any(ConfigError)


@dataclass(frozen=True)
class TaskSettings:
    """One evaluation task. limit None means every item of `data_file`.

    reference: what the answers are compared with item by item: a folder in Hugging Face's format,
               which transformers runs, a .nemo file, which NeMo runs, or the report.json of another
               evaluation or of measure_reference
    """

    name: str
    data_file: ConfigPath
    limit: int | None = option(None, "most items; by default all", lower=1)
    batch_size: int = option(8, "items in flight", lower=1)
    reference: ConfigPath | None = None
    generation: GenerationSettings = field(default_factory=GenerationSettings)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", RENAMED_TASKS.get(self.name, self.name))
        problems = Problems(f"the evaluation task {self.name}")
        key = f"evaluate.tasks.{self.name}"
        problems.check_choice("evaluation task", self.name, TASK_NAMES, "evaluate.tasks")
        check_options(self, problems, f"{key}.{{}}".format)
        if self.name == "encode" and self.reference is None:
            problems.add(
                "encode compares states with those of transformers, so it needs a reference",
                choices=("the folder of the original, in Hugging Face's format",),
                change=f"{key}.reference",
            )
        if self.name == "translation" and self.generation.target_file is None:
            problems.add("translation needs a target_file", change=f"{key}.generation.target_file")
        problems.raise_if_any(ConfigError)


@dataclass(frozen=True)
class BenchmarkSettings:
    """A speed sweep: every batch size with every [input, output] length in tokens."""

    batch_sizes: tuple[int, ...] = (1,)
    lengths: tuple[tuple[int, int], ...] = ((60, 20),)
    requests: int = option(10, "measured requests", lower=1)
    warmup: int = option(2, "warm-up requests before them", lower=0)

    def __post_init__(self) -> None:
        problems = Problems("the benchmark settings")
        sizes = [length for pair in self.lengths for length in pair]
        for name, min_of in (("batch_sizes", self.batch_sizes), ("lengths", tuple(sizes))):
            if not min_of or min(min_of) < 1:
                problems.add(
                    f"{name} must hold numbers of at least 1",
                    got=list(getattr(self, name)),
                    change=f"evaluate.benchmark.{name}",
                )
        check_options(self, problems, "evaluate.benchmark.{}".format)
        problems.raise_if_any(ConfigError)


KEY = "evaluate.harness"
_NAME = re.compile(r"\w[\w.:+-]*")


@dataclass(frozen=True)
class HarnessSettings:
    """lm-evaluation-harness (lm_eval) asks the model through a gateway's completions.

    tasks:    lm_eval's names of tasks and groups; none: it asks nothing
    data:     the folder that has the data sets, each as <owner>/<name>, as the hub calls it
    gateway:  its address, http://host:port/v1, or its ready file; None: the server's own gateway
    api_keys: of a gateway that wants one: lines NAME=key, of which the first is used
    python:   the interpreter that has lm_eval; None: the job's
    """

    tasks: tuple[str, ...] = ()
    data: ConfigPath | None = None
    limit: int | None = option(None, "most items of a task; by default all", lower=1)
    num_fewshot: int | None = option(
        None, "few-shot examples of an item; by default the task's own number", lower=0
    )
    concurrency: int = option(8, "requests in flight", lower=1)
    gateway: str | None = None
    api_keys: SecretPath | None = None
    python: str | None = None

    def __post_init__(self) -> None:
        problems = Problems("the settings of lm_eval")
        check_options(self, problems, f"{KEY}.{{}}".format)
        for name in self.tasks:
            if not _NAME.fullmatch(name):
                problems.add("not a name of a task", got=name, change=f"{KEY}.tasks")
        if self.tasks and self.data is None:
            problems.add(
                "lm_eval downloads nothing: it needs a folder with the data sets of its tasks",
                change=f"{KEY}.data (docs/evaluation.md)",
            )
        problems.raise_if_any(ConfigError)

    @property
    def gateway_is_file(self) -> bool:
        """Return whether `gateway` is a ready file, not an address."""
        return self.gateway is not None and "://" not in self.gateway


RUNGS = ("fp32", "bf16", "fp16", *QUANTIZATIONS)


@dataclass(frozen=True)
class LadderPrecision:
    """One precision, and where its jobs leave what is known of it.

    report_dir:     results folder of its evaluation
    checkpoint_dir: folder of its weights; None: in a cloud storage
    jobs:           folders of its jobs, in order
    """

    name: str
    report_dir: str
    checkpoint_dir: str | None = None
    jobs: tuple[str, ...] = ()


@dataclass(frozen=True)
class LadderSettings:
    """Compare the rungs' evaluations; the report goes to results_dir."""

    error_code: ClassVar[int] = ERROR

    results_dir: str
    model_name: str
    rungs: tuple[LadderPrecision, ...]


def check_rungs(names: tuple[str, ...]) -> None:
    """Raises ConfigError for rungs that do not exist, or that are named twice."""
    problems = Problems("the ladder")
    for name in names:
        problems.check_choice("rung", name, RUNGS, "evaluate.ladder")
    if len(set(names)) < len(names):
        problems.add("a rung is named twice", got=list(names), change="evaluate.ladder")
    problems.raise_if_any(ConfigError)


RUNNERS = ("auto", "transformers", "core", "nemo", "engine")


@dataclass(frozen=True)
class ReferenceSettings:
    """Comparison with the reference model: its runner, and the texts.

    checkpoint: the original; None: what the served model's manifest names as its source
    runner:     transformers, core (Megatron-LM core), nemo, or engine, this project's own in
                float32; auto: the code of the checkpoint's maker where it is installed, else engine
    data_file:  JSON lines with a "text"; None: the LAMBADA items that come with the launcher
    margin:     largest mean difference of log-probabilities that counts as none, in nats a token
    alpha:      level of each of the two one-sided tests
    layers:     compare the hidden states of the exported layers with the original's, on the CPU
    sign:       the key that signs the certificate
    """

    checkpoint: ConfigPath | None = None
    runner: str = option("auto", "software that runs the original", choices=RUNNERS)
    data_file: ConfigPath | None = None
    limit: int | None = option(32, "most texts; null: all", lower=1)
    max_tokens: int = option(128, "tokens of each text that are compared", lower=2)
    continuation: int = option(16, "tokens generated after a text", lower=0)
    batch_size: int = option(8, "texts in flight", lower=1)
    margin: float = 0.01
    alpha: float = 0.05
    layers: bool = True
    sign: SigningKey | None = None

    def __post_init__(self) -> None:
        problems = Problems("the twin of the evaluation")
        check_options(self, problems, "evaluate.twin.{}".format)
        if not 0 < self.margin < float("inf"):
            message = "margin must be above 0"
            problems.add(message, got=self.margin, change="evaluate.twin.margin")
        if not 0 < self.alpha < 0.5:
            message = "alpha must be above 0 and below 0.5"
            problems.add(message, got=self.alpha, change="evaluate.twin.alpha")
        problems.raise_if_any(ConfigError)


PATHS = ("gateway", "grpc", "http")
GENERATORS = ("builtin", "guidellm")
_KEY = "evaluate.load.{}"


@dataclass(frozen=True)
class LoadPrompts:
    """Prompts of a load test. Lengths are in tokens.

    data_file: prompts to take in turn: JSON lines with `text` or `prompt`, or a text a line; None:
               random token ids
    spread:    lengths are uniform between (1 - spread) and (1 + spread) times input and output
    """

    data_file: ConfigPath | None = None
    input: int = option(128, "tokens of a prompt; with data_file, the most", lower=1)
    output: int = option(64, "tokens that each request generates", lower=1)
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
class GoodputBounds:
    """Limits of a request that counts as goodput, in milliseconds; None: no limit.

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
    requests: int | None = option(None, "requests of a run", lower=1)
    seconds: float | None = option(30.0, "seconds of a run", lower=1)
    warmup: float = option(2.0, "seconds of warm-up, which do not count", lower=0)
    prompts: LoadPrompts = field(default_factory=LoadPrompts)
    stream: bool = True
    bounds: GoodputBounds = field(default_factory=GoodputBounds)
    find_saturation: bool = False
    saturation_runs: int = option(12, "most runs of the search", lower=2)
    gateway: str | None = None
    api_key_file: ConfigPath | None = None
    generator: str = option("builtin", "load generator", choices=GENERATORS)
    processes: int = option(1, "processes that send the requests", lower=1)
    seed: int = option(0, "random seed of prompts and arrivals", lower=0)
    time_limit: float = option(3600.0, "seconds that the whole test may take", lower=1)

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


NEWEST, OLDEST = ORDERS = ("newest", "oldest")
NEVER, AFTER_GO = SWAPS = ("never", "after_go")


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """The keys of the block `watch` besides `run`.

    Fractions are 0 to 1, times are in seconds; None: no limit.
    """

    training_dir: ConfigPath
    interval: float = option(300.0, "seconds between two looks at the folder", lower=0)
    order: str = option(NEWEST, "which waiting checkpoint is next", choices=ORDERS)
    parallel: int = option(1, "maximum number of checkpoints evaluated concurrently", lower=1)
    attempts: int = option(2, "maximum number of attempts per checkpoint", lower=1)
    level: float = option(0.05, "probability of a false alarm in a series without a drop")
    max_drop: float = option(0.02, "drop that counts as a regression, as in evaluate.policy")
    baseline: ConfigPath | None = option(None, "report.json that every checkpoint is compared with")
    keep_exports: int | None = option(
        None, "number of evaluated checkpoints whose export stays, besides the latest GO's", lower=1
    )
    swap: str = option(NEVER, "when swap_server gets the weights of a checkpoint", choices=SWAPS)
    swap_server: str | None = option(
        None, "ready file or job of a running server of the same sizes"
    )
    swap_ca: ConfigPath | None = option(None, "certificates to trust, of its gateway with TLS")
    max_checkpoints: int | None = option(None, "end after this many evaluations", lower=1)
    idle_timeout: float | None = option(
        None, "end after this many seconds without a new checkpoint", lower=0
    )

    def __post_init__(self) -> None:
        problems = Problems("the watch settings")
        check_options(self, problems, "watch.{}".format)
        if self.swap == AFTER_GO and self.swap_server is None:
            message = f"swap={AFTER_GO} needs the server that gets the weights"
            problems.add(message, change="watch.swap_server")
        for name in ("level", "max_drop"):
            if not 0 < getattr(self, name) < 1:
                problems.add(
                    f"{name} is a fraction between 0 and 1",
                    got=getattr(self, name),
                    change=f"watch.{name}",
                )
        problems.raise_if_any(ConfigError)


@dataclass(frozen=True, kw_only=True)
class WatchSettings(WatchOptions):
    """Evaluate the checkpoints in training_dir; reports and the trend go to results_dir.

    command:   argv that exports, serves and evaluates a checkpoint, without the keys that differ
               from checkpoint to checkpoint
    successor: argv that submits the next look to the scheduler, or empty: this process looks on
    folder:    working directory of both
    job_folder: of this look's job; those of earlier looks are beside it
    """

    error_code: ClassVar[int] = ERROR

    results_dir: str
    model_name: str
    command: tuple[str, ...]
    successor: tuple[str, ...] = ()
    folder: str = "."
    job_folder: str | None = None
