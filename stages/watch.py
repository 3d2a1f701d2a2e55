"""Watch: evaluate every checkpoint that a training writes, and judge the series."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from launcher_scripts.cluster.job import Job, JobFolder
from launcher_scripts.config.evaluation import WatchOptions, WatchSettings
from launcher_scripts.config.options import values_of, with_absolute_paths
from launcher_scripts.config.settings import CHECKPOINT_KEY
from stages.deploy import Deploy
from stages.evaluate import Evaluate
from stages.export import Export
from stages.stage import ClientRun, Stage

MAIN = Path(__file__).resolve().parents[1] / "main.py"
# Keys that have another value for every checkpoint, or that are about the watch alone.
_OWN_KEY = re.compile(
    rf"\+*(stages|watch(\.[\w.]+)?|dry_run|base_results_dir|evaluate\.run\.results_dir"
    rf"|{re.escape(CHECKPOINT_KEY)})=.*",
    re.DOTALL,
)
_OF_ONE_LOOK = re.compile(r"\+*watch\.cluster\.(dependency|sbatch_args)=.*", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class WatchBlock(WatchOptions):
    """The `watch` block of the configuration."""

    run: ClientRun


class Watch(Stage):
    """One job that looks on, or on a scheduler a short job per look that submits the next one."""

    name = "watch"
    block_type = WatchBlock
    modules = ("watch",)

    block: WatchBlock

    @property
    def in_container(self) -> bool:
        """On the host, where the scheduler's commands are."""
        return False

    @cached_property
    def settings(self) -> WatchSettings:
        block = self.block
        settings = WatchSettings(
            results_dir=str(self.results_dir),
            model_name=str(self.launch.blocks["export"]["run"]["model_train_name"]),
            command=(sys.executable, str(MAIN), *self._arguments()),
            successor=self._successor(),
            folder=str(Path.cwd()),
            **values_of(WatchOptions, block),
        )
        return with_absolute_paths(settings)

    def _arguments(self) -> Iterator[str]:
        """The command line's keys that are the same for every checkpoint."""
        yield "stages=[export,deploy,evaluate]"
        yield from (text for text in self.launch.arguments if not _OWN_KEY.fullmatch(text))

    def _successor(self) -> tuple[str, ...]:
        """The command that submits the next look; empty where this process looks on."""
        options: Any = self.cluster.options
        if not hasattr(options, "sbatch_args"):
            return ()
        arguments = [text for text in self.launch.arguments if not _OF_ONE_LOOK.fullmatch(text)]
        further = [text for text in options.sbatch_args if not text.startswith("--begin=")]
        further.append(f"--begin=now+{max(1, round(self.block.interval))}")
        listed = ",".join(f"'{text}'" for text in further)
        return (
            sys.executable,
            str(MAIN),
            *arguments,
            f"watch.cluster.sbatch_args=[{listed}]",
            "watch.cluster.dependency=singleton",
        )

    def job_settings(self, folder: JobFolder, server: Job | None) -> WatchSettings:  # noqa: ARG002
        return replace(self.settings, job_folder=str(folder.root))

    def check_stage(self) -> None:
        checks, launch = self.launch.checks, self.launch
        if launch.stages != (self.name,):
            checks.problems.add(
                "a watch starts the other stages itself, once per checkpoint",
                got=list(launch.stages),
                change="'stages=[watch]'",
            )
        checks.paths("the watch's {}", self.settings, "watch")
        for kind in (Export, Deploy, Evaluate):
            with checks.problems.collecting():
                stage = kind(launch)
                if isinstance(stage, Evaluate):
                    self._check_evaluation(stage)

    def _check_evaluation(self, evaluate: Evaluate) -> None:
        """An evaluation ends with a verdict, and leaves no server."""
        problems = self.launch.checks.problems
        if not evaluate.block.stop_server:
            message = "the servers of a watch end with their evaluations"
            problems.add(message, got=False, change="evaluate.stop_server=True")
        if evaluate.block.policy is None:
            problems.add("a watch needs verdicts", got=None, change="evaluate.policy")
        if evaluate.block.ladder:
            message = "a watch evaluates each checkpoint in one precision"
            problems.add(message, got=list(evaluate.block.ladder), change="evaluate.ladder=null")
