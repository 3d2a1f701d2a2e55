"""What an evaluation measures: its tasks and its speed sweep, as a part of EvaluateSettings."""

from __future__ import annotations

from dataclasses import dataclass, field

from launcher_scripts.common.errors import ConfigError, Problems

TASK_NAMES = ("lambada", "squad", "boolq", "summarization", "translation")


@dataclass(frozen=True)
class GenerationSettings:
    """How a task's items become prompts, and how their answers are generated.

    template:      the prompt; {names} in it are the item's fields; None: the task's own
    target_file:   what the answers are compared with, where data_file does not hold it
    output_len:    tokens generated at most
    max_input_len: tokens of a prompt at most; the end of its longest field is cut off; None: all
    prompt_task, ia3_task: which learned prompt or IA3 adapter to use, by number; None: none
    """

    template: str | None = None
    target_file: str | None = None
    output_len: int = 64
    max_input_len: int | None = None
    prompt_task: int | None = None
    ia3_task: int | None = None
    beam_width: int = 1
    len_penalty: float = 0.0

    def __post_init__(self) -> None:
        problems = Problems("the generation of an evaluation task")
        key = "evaluate.tasks.<task>.generation"
        for name in ("output_len", "beam_width", "max_input_len"):
            value = getattr(self, name)
            if value is not None:
                problems.check_at_least(name, value, 1, f"{key}.{name}")
        for name in ("prompt_task", "ia3_task"):
            value = getattr(self, name)
            if value is not None:
                problems.check_at_least(name, value, 0, f"{key}.{name}")
        problems.raise_if_any(ConfigError)


@dataclass(frozen=True)
class TaskSettings:
    """One evaluation task. limit None means every item of `data_file`.

    reference: what the answers are compared with item by item: a folder in Hugging Face's format,
               which transformers runs, a .nemo file, which NeMo runs, or the report.json of another
               evaluation or of measure_reference
    """

    name: str
    data_file: str
    limit: int | None = None
    batch_size: int = 8
    reference: str | None = None
    generation: GenerationSettings = field(default_factory=GenerationSettings)

    def __post_init__(self) -> None:
        problems = Problems(f"the evaluation task {self.name}")
        key = f"evaluate.tasks.{self.name}"
        problems.check_choice("evaluation task", self.name, TASK_NAMES, "evaluate.tasks")
        problems.check_at_least("batch_size", self.batch_size, 1, f"{key}.batch_size")
        if self.limit is not None:
            problems.check_at_least("limit", self.limit, 1, f"{key}.limit")
        if self.name == "translation" and self.generation.target_file is None:
            problems.add("translation needs a target_file", change=f"{key}.generation.target_file")
        problems.raise_if_any(ConfigError)


@dataclass(frozen=True)
class BenchmarkSettings:
    """A speed sweep: every batch size with every [input, output] length in tokens."""

    batch_sizes: tuple[int, ...] = (1,)
    lengths: tuple[tuple[int, int], ...] = ((60, 20),)
    requests: int = 10
    warmup: int = 2

    def __post_init__(self) -> None:
        problems = Problems("the benchmark settings")
        sizes = [length for pair in self.lengths for length in pair]
        for name, least_of in (("batch_sizes", self.batch_sizes), ("lengths", tuple(sizes))):
            if not least_of or min(least_of) < 1:
                problems.add(
                    f"{name} must hold numbers of at least 1",
                    got=list(getattr(self, name)),
                    change=f"evaluate.benchmark.{name}",
                )
        problems.check_at_least("requests", self.requests, 1, "evaluate.benchmark.requests")
        problems.check_at_least("warmup", self.warmup, 0, "evaluate.benchmark.warmup")
        problems.raise_if_any(ConfigError)
