"""Code shared by all steps: settings in, by a file or by flags, and one exit status out.

Command-line flags from a settings dataclass, for people who run a step without a stage.

Every option becomes a flag of its name, a nested dataclass one flag per member. What is given goes
through the same checks as a settings file; what is not keeps the dataclass's default.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import signal
import sys
import traceback
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

from launcher_scripts.common.command_line import CommandParser, with_open_output
from launcher_scripts.common.errors import LauncherError, problem
from launcher_scripts.common.exit_codes import VERDICT_FILE
from launcher_scripts.common.processes import bus_errors_as, process_name, signal_when_parent_dies
from launcher_scripts.config.options import Option, build, option_of
from launcher_scripts.config.settings import (
    EvaluateSettings,
    ExportSettings,
    Settings,
    read_settings,
)
from launcher_scripts.evaluation.journal import locked, remove_journals
from launcher_scripts.evaluation.report_content import FILE_NAME, read_content

Values = dict[str, Any]
# A key of the export's configuration, and the fields that have other names than their keys.
_KEY = re.compile(r"export\.(?:model|triton_deployment|run)\.(?P<name>\w+)(?:=(?P<value>[\w.]+))?")
_FIELDS = {
    "tensor_model_parallel_size": "parallelism.tp_size",
    "pipeline_model_parallel_size": "parallelism.pp_size",
    "tokenizer": "tokenizer.source",
    "results_dir": "triton_model_dir",
    "model_train_name": "triton_model_dir",
}
_WORDS = {str: "TEXT", int: "N", float: "N"}


@dataclass(frozen=True)
class FlagTable:
    """The flags of a settings dataclass: one for every field that is an option.

    own:      field (of a nested dataclass: `field.member`) -> its option, where the flag differs
    left_out: fields that the step does not use
    complete: fills in what the flags leave open, before the checks
    """

    kind: type
    own: Mapping[str, Option] = field(default_factory=dict)
    left_out: Collection[str] = ()
    complete: Callable[[Values], Values] = dict

    @property
    def options(self) -> dict[str, tuple[Option, Any, Any]]:
        """Field -> its option, type and default."""
        result = {}
        for key, hint, item in fields(self.kind):
            field_option = self.own.get(key) or option_of(item)
            if field_option is not None and key not in self.left_out:
                result[key] = (field_option, hint, item.default)
        return result

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """One argument per field; those without a default come first and are required."""
        needed = parser.add_argument_group("required")
        others = parser.add_argument_group("optional")
        for key, (field_option, hint, default) in self.options.items():
            required = default is dataclasses.MISSING
            text = (
                field_option.help
                if required or default in (None, ())
                else f"{field_option.help} [{default}]"
            )
            (needed if required else others).add_argument(
                _spelled(key, field_option),
                dest=key,
                default=argparse.SUPPRESS,
                required=required,
                help=text.replace("%", "%%"),
                **_options(hint, field_option),
            )

    def settings(self, args: argparse.Namespace) -> Any:
        """The settings that the flags say; raises ConfigError with every problem."""
        values: Values = {}
        for key in self.options:
            if not hasattr(args, key):
                continue
            outer, _, member = key.partition(".")
            if member:
                values.setdefault(outer, {})[member] = getattr(args, key)
            else:
                values[outer] = getattr(args, key)
        return build(self.kind, self.complete(values), "the command line")

    def in_flags(self, message: str) -> str:
        """A message of the configuration's keys with the flags in their place."""
        spelled = {
            key: _spelled(key, field_option) for key, (field_option, _, _) in self.options.items()
        }
        names = {
            **spelled,
            **{name: spelled[key] for name, key in _FIELDS.items() if key in spelled},
        }

        def flag(match: re.Match[str]) -> str:
            name, value = names.get(match["name"]), match["value"]
            if name is None:
                return match[0]
            return name if value in (None, "True") else f"{name} {value}"

        return _KEY.sub(flag, message)


def fields(kind: type, prefix: str = "") -> list[tuple[str, Any, dataclasses.Field[Any]]]:
    """(key, type, field) of every field, with nested dataclasses opened."""
    hints = typing.get_type_hints(kind)
    result: list[tuple[str, Any, dataclasses.Field[Any]]] = []
    for item in dataclasses.fields(kind):
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint):
            result += fields(typing.cast(type, hint), f"{prefix}{item.name}.")
        else:
            result.append((f"{prefix}{item.name}", hint, item))
    return result


def _options(hint: Any, field_option: Option) -> Values:
    """Return argparse's options for a type: a switch, a list, or one value."""
    arguments = typing.get_args(hint)
    many = typing.get_origin(hint) is tuple
    if arguments:  # of a tuple, or of X | None
        hint = next(argument for argument in arguments if argument is not type(None))
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    metavar = field_option.metavar or "|".join(field_option.choices) or _WORDS[hint]
    return {"type": hint, "metavar": metavar, **({"nargs": "+"} if many else {})}


def _spelled(key: str, field_option: Option) -> str:
    return "--" + (field_option.flag or key.replace("_", "-").replace(".", "-"))


_SHORTENED = (
    "a file became shorter, or its disk failed, while it was read; nothing may write to a "
    "checkpoint that is in use"
)


def run_step(
    description: str,
    kind: type[Settings],
    body: Callable[[Settings], int | None],
    argv: Sequence[str] | None = None,
    flags: FlagTable | None = None,
) -> int:
    """Read the settings that argv names, do `body` with them, and return the exit status.

    With `flags`, argv may say the settings itself instead of naming a file. The status is what
    the body returns, or 0. A LauncherError is printed without a traceback, any other exception with
    it; both give `kind.error_code`, or 1 where the kind has none. Ctrl-C and SIGTERM unwind the
    body like an exception and give the shell's 130 and 143.
    """
    args = _parsed(description, sys.argv[1:] if argv is None else argv, flags)
    _end_with_parent(getattr(args, "settings", None))
    failed: int = getattr(kind, "error_code", 1)
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        with bus_errors_as(_SHORTENED, failed):
            if flags is None or "settings" in args:
                return with_open_output(lambda: body(read_settings(kind, args.settings)))
            return with_open_output(lambda: body(flags.settings(args)))
    except LauncherError as error:
        by_flags = flags is not None and "settings" not in args
        print(flags.in_flags(str(error)) if flags and by_flags else error, file=sys.stderr)
        return failed
    except Exception:
        traceback.print_exc()
        return failed
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except _Terminated:
        return 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)


def resumed(settings: ExportSettings) -> ExportSettings:
    """Settings with `reuse` in a job that Slurm started again: its first start may have finished
    this step.
    """
    restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    return replace(settings, reuse=True) if restarts else settings


def _parsed(description: str, argv: Sequence[str], flags: FlagTable | None) -> argparse.Namespace:
    """The arguments: --settings alone, or the flags alone where a step has some."""
    by_file = CommandParser(description=description, allow_abbrev=False)
    by_file.add_argument(
        "--settings", type=Path, required=True, metavar="FILE", help="YAML that the stage wrote"
    )
    if flags is None or any(word.partition("=")[0] == "--settings" for word in argv):
        return by_file.parse_args(argv)
    by_flags = CommandParser(
        description=description,
        allow_abbrev=False,
        usage=f"{by_file.prog} --settings FILE\n       {by_file.prog} FLAGS",
    )
    flags.add_to(by_flags)
    return by_flags.parse_args(argv)


def _end_with_parent(settings: Path | None) -> None:
    """Ask the kernel for SIGTERM when what runs the job dies: it alone ends the job's processes.

    That is Slurm's daemon of this step, or the job's script, which dies with its launcher.
    """
    parent = os.getppid()
    try:
        name = process_name(parent)
        command = os.fsdecode(Path(f"/proc/{parent}/cmdline").read_bytes()).split("\0")
    except OSError:
        return
    folder = None if settings is None else settings.parent
    of_job = any(Path(part).parent == folder and part.endswith(".sh") for part in command)
    if name == "slurmstepd" or of_job:
        signal_when_parent_dies(signal.SIGTERM)
        if os.getppid() != parent:
            raise SystemExit(128 + signal.SIGTERM)


class _Terminated(SystemExit):
    """SIGTERM came; a SystemExit, so that no library on the way takes it for an error."""


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise _Terminated


_MAX_PARAM = 500  # characters of a value that MLflow takes


def run_evaluation(
    step: str,
    description: str,
    body: Callable[[EvaluateSettings], int | None],
    argv: Sequence[str] | None = None,
) -> int:
    """The step of that name as run_step runs it.

    The journals stay until the last step of the job has ended well: what an earlier step measured
    is not asked again when a later one was interrupted.
    """

    def exclusive(settings: EvaluateSettings) -> int | None:
        check_exports(settings)
        with locked(Path(settings.results_dir)) as journals:
            status = body(settings)
            if settings.steps[-1:] in ((), (step,)):
                for name in settings.export:
                    EXPORTERS[name](settings)
                remove_journals(journals)
        return status

    return run_step(description, EvaluateSettings, exclusive, argv)


class ExportError(LauncherError):
    """Results could not be exported; they are in the results folder."""


def check_exports(settings: EvaluateSettings) -> None:
    """Raise ExportError before anything is measured, if a package is missing."""
    for name in settings.export:
        if find_spec(name) is None:
            text = f"evaluate.export needs the package {name} in the job's Python"
            raise ExportError(problem(text, change=f"pip install {name}, or evaluate.export=[]"))


def export_to_mlflow(settings: EvaluateSettings) -> None:
    """Write a run of MLflow: parameters, figures, the report and the verdict as artifacts.

    MLFLOW_TRACKING_URI says where, by default the folder mlruns of the results folder;
    MLFLOW_EXPERIMENT_NAME is the model's name by default. Raises ExportError where it fails.
    """
    import mlflow

    folder = Path(settings.results_dir)
    report = read_content(folder, "evaluate.run.results_dir")
    names = (FILE_NAME, "report.html", VERDICT_FILE)
    files = [folder / name for name in names if (folder / name).exists()]
    if "MLFLOW_TRACKING_URI" not in os.environ:
        os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # MLflow 3 prefers databases
        mlflow.set_tracking_uri((folder / "mlruns").absolute().as_uri())
    try:
        if "MLFLOW_EXPERIMENT_NAME" not in os.environ:
            mlflow.set_experiment(settings.model_name)
        with mlflow.start_run(run_name=folder.name) as run:
            mlflow.log_params(dict(parameters(report)))
            for name, value, step in figures(report):
                mlflow.log_metric(name, value, step=step)
            if "verdict" in report:
                mlflow.set_tag("verdict", report["verdict"]["verdict"])
            for path in files:
                mlflow.log_artifact(str(path))
    except Exception as error:
        text = f"cannot export the results to MLflow: {error}"
        change = "env_vars.MLFLOW_TRACKING_URI, or evaluate.export=[]"
        raise ExportError(problem(text, change=change)) from error
    print(f"exported to MLflow: run {run.info.run_id} of {mlflow.get_tracking_uri()}", flush=True)


EXPORTERS: dict[str, Callable[[EvaluateSettings], None]] = {"mlflow": export_to_mlflow}


def sections(report: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The measured sections of a report by name; a task has its own."""
    yield from report["tasks"].items()
    for name, section in report.items():
        if name != "tasks" and isinstance(section, dict) and "settings" in section:
            yield name, section


def parameters(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The settings of every section as texts."""
    yield "model", str(report["model"])
    for section, content in sections(report):
        for key, value in _flat(content["settings"]):
            yield f"{section}.{key}", str(value)[:_MAX_PARAM]


def figures(report: Mapping[str, Any]) -> Iterator[tuple[str, float, int]]:
    """Name, value and step of every figure; the runs of a load test are its steps."""
    for section, content in sections(report):
        for name, metric in content.get("metrics", {}).items():
            value = metric.get("value") if isinstance(metric, dict) else None
            if isinstance(value, int | float):
                yield f"{section}.{name}", float(value), 0
        for step, run in enumerate(content.get("runs", ())):
            for name in ("requests_per_second", "tokens_per_second", "failed"):
                if run.get(name) is not None:
                    yield f"{section}.{name}", float(run[name]), step


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{name}", item) for name, item in _flat(value))
        else:
            yield key, value
