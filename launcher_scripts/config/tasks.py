"""What an evaluation measures: its tasks and its speed sweep, as a part of EvaluateSettings."""

from __future__ import annotations

from dataclasses import dataclass, field

from launcher_scripts.common.errors import ConfigError, Problems
from launcher_scripts.config.options import check_options, option
from launcher_scripts.config.paths import ConfigPath

TASK_NAMES = ("lambada", "squad", "boolq_generate", "summarization", "translation", "encode")
# The name of a task in earlier configurations and reports -> its name.
RENAMED_TASKS = {"boolq": "boolq_generate"}


@dataclass(frozen=True)
class GenerationSettings:
    """How a task's items become prompts, and how their answers are generated.

    template:      the prompt; {names} in it are the item's fields; None: the task's own
    target_file:   what the answers are compared with, where data_file does not hold it
    max_input_len: the end of a prompt's longest field is cut off; None: nothing is
    prompt_task, ia3_task, lora_adapter: None: none
    source_language, target_language: of a model of several; None: as the checkpoint says
    """

    template: str | None = None
    target_file: ConfigPath | None = None
    output_len: int = option(64, "most tokens to generate", least=1)
    max_input_len: int | None = option(None, "most tokens of a prompt", least=1)
    prompt_task: int | None = option(None, "number of a learned prompt", least=0)
    ia3_task: int | None = option(None, "number of an IA3 adapter", least=0)
    lora_adapter: int | None = option(None, "number of a LoRA adapter", least=0)
    source_language: str | None = None
    target_language: str | None = None
    beam_width: int = option(1, "beams", least=1)
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
    limit: int | None = option(None, "most items; by default all", least=1)
    batch_size: int = option(8, "items in flight", least=1)
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
    requests: int = option(10, "measured requests", least=1)
    warmup: int = option(2, "warm-up requests before them", least=0)

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
        check_options(self, problems, "evaluate.benchmark.{}".format)
        problems.raise_if_any(ConfigError)
