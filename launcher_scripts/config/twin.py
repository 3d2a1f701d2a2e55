"""The twin of an evaluation: the original checkpoint, asked what the served model is asked."""

from __future__ import annotations

from dataclasses import dataclass

from launcher_scripts.common.errors import ConfigError, Problems
from launcher_scripts.config.options import check_options, option
from launcher_scripts.config.paths import ConfigPath

RUNNERS = ("auto", "transformers", "core", "nemo", "engine")


@dataclass(frozen=True)
class TwinSettings:
    """What runs beside the served model, and on which texts.

    checkpoint: the original; None: what the served model's manifest names as its source
    runner:     transformers, core (Megatron-LM core), nemo, or engine, this project's own in
                float32; auto: the code of the checkpoint's maker where it is installed, else engine
    data_file:  JSON lines with a "text"; None: the LAMBADA items that come with the launcher
    """

    checkpoint: ConfigPath | None = None
    runner: str = option("auto", "software that runs the original", choices=RUNNERS)
    data_file: ConfigPath | None = None
    limit: int | None = option(32, "most texts; null: all", least=1)
    max_tokens: int = option(128, "tokens of each text that are compared", least=2)
    continuation: int = option(16, "tokens generated after a text", least=0)
    batch_size: int = option(8, "texts in flight", least=1)

    def __post_init__(self) -> None:
        problems = Problems("the twin of the evaluation")
        check_options(self, problems, "evaluate.twin.{}".format)
        problems.raise_if_any(ConfigError)
