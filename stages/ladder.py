"""The precision ladder: the same stages once per rung, and a job that compares them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from launcher_scripts.cluster.job import Job
from launcher_scripts.common.errors import ConfigError, problem
from launcher_scripts.common.quantization import QUANTIZATIONS
from launcher_scripts.config.ladder import LadderRung, LadderSettings, check_rungs
from launcher_scripts.config.settings import AUTO
from stages.checks import Checks
from stages.deploy import Deploy
from stages.evaluate import Evaluate
from stages.export import Export
from stages.stage import ClientRun, Launch, Stage

KEY = "evaluate.ladder"
TIME_LIMIT = "0:10:00"
_HALF_TYPES = ("fp16", "bf16")
_STAGES = ("export", "deploy", "gateway", "evaluate")


def configurations(config: DictConfig) -> Iterator[DictConfig]:
    """The configuration of every rung, in order; without a ladder the given one.

    A rung's evaluate.ladder names that rung alone. Raises ConfigError for wrong rungs.
    """
    names = config.evaluate.ladder
    if names is None:
        yield config
        return
    if OmegaConf.is_list(names):
        names = tuple(map(str, names))
    if not isinstance(names, tuple) or not names:
        raise ConfigError(problem("a ladder is a list of rungs", got=names, change=KEY))
    check_rungs(names)
    for name in names:
        yield _rung(copy.deepcopy(config), name)


def _rung(config: DictConfig, name: str) -> DictConfig:
    """The rung's precision, and names of its own for its folders and jobs."""
    model, serving = config.export.model, config.export.triton_deployment
    quantization = QUANTIZATIONS.get(name)
    data_type = str(serving.data_type) if quantization else name
    if data_type == AUTO:
        data_type = "bf16"
    if quantization and data_type not in _HALF_TYPES:
        key = "export.triton_deployment.data_type"
        what = f"the rung {name} computes in the configured half type"
        raise ConfigError(problem(what, got=data_type, choices=_HALF_TYPES, change=key))
    model.weight_data_type = serving.data_type = data_type
    serving.int8_mode, serving.quantization = 0, quantization
    model.reuse = not model.overwrite
    config.evaluate.ladder = [name]
    if quantization:
        config.export.run.config_summary = f"{config.export.run.config_summary}_{name}"
    for stage in _STAGES:
        config[stage].run.name = f"{config[stage].run.name}_{name}"
    return config


@dataclass(frozen=True)
class LadderBlock:
    """What other stages have in the configuration; see Ladder."""

    run: ClientRun


class Ladder(Stage):
    """The comparison of all rungs. Its checks are of the rungs together."""

    name = "ladder"
    block_type = LadderBlock
    modules = ("write_ladder",)
    caches = Evaluate.caches

    def __init__(self, rungs: Sequence[Launch]) -> None:
        first = Evaluate(rungs[0])
        base, model = rungs[0].config.base_results_dir, first.block.model_name
        run = {
            "name": f"ladder_{model}",
            "time_limit": TIME_LIMIT,
            "results_dir": f"{base}/{model}/ladder",
            "gpus_per_node": first.block.run.gpus_per_node,
        }
        checks = Checks(rungs[0].config.mounts())
        super().__init__(replace(rungs[0], blocks={self.name: {"run": run}}, checks=checks))
        self._rungs = [Evaluate(rung) for rung in rungs]

    @cached_property
    def settings(self) -> LadderSettings:
        rungs = tuple(_known(evaluate) for evaluate in self._rungs)
        return LadderSettings(str(self.results_dir), self._rungs[0].block.model_name, rungs)

    def of_jobs(self, job: Job, rungs: Sequence[Sequence[Job]]) -> Job:
        """The job with the folders of the jobs that it compares."""
        known = tuple(
            replace(rung, jobs=tuple(str(each.folder.root) for each in jobs))
            for rung, jobs in zip(self.settings.rungs, rungs, strict=True)
        )
        return replace(job, settings=replace(self.settings, rungs=known))

    def paths(self) -> list[Path]:
        launches = [evaluate.launch for evaluate in self._rungs]
        stages = [kind(launch) for launch in launches for kind in (Export, Deploy, Evaluate)]
        weights = [rung.checkpoint_dir for rung in self.settings.rungs]
        return [*(stage.results_dir for stage in stages), *map(Path, filter(None, weights))]

    def check_own(self) -> None:
        problems, stages = self.launch.checks.problems, self.launch.stages
        if not {"deploy", "evaluate"} <= {*stages}:
            problems.add(
                "a ladder serves and evaluates every rung",
                got=list(stages),
                change="stages=[export,deploy,evaluate]",
            )
        if not self._rungs[0].block.stop_server:
            problems.add(
                "the rungs of a ladder are served one after the other",
                got=False,
                change="evaluate.stop_server=True",
            )
        rungs = self.settings.rungs
        for key, folders in (
            ("evaluate.run.results_dir", [rung.report_dir for rung in rungs]),
            ("export.triton_deployment.triton_model_dir", [rung.checkpoint_dir for rung in rungs]),
        ):
            if len(set(folders)) < len(folders):
                problems.add(
                    "two rungs of the ladder have the same folder",
                    got=folders,
                    change=f"{key} (with ${{export.run.config_summary}} in it)",
                )


def _known(evaluate: Evaluate) -> LadderRung:
    (name,) = evaluate.block.ladder or ("",)
    model = evaluate.served_model
    folder = None if model is None else str(model.checkpoint_dir)
    return LadderRung(name, str(evaluate.results_dir), folder)
