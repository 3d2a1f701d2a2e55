"""Journals: results that an interrupted evaluation continues from.

Every measurement has a file of JSON lines in the results folder's `journal`. The first line says
what the results depend on; a line follows for every run that went on with it, and for every
result. A run with the same set-up takes these results and asks for the rest.

report.json as it is read again: to add to it, to compare with it, to judge it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from launcher_scripts.common.errors import ConfigError, problem
from launcher_scripts.common.files import parse_json, read_plain
from launcher_scripts.evaluation.tasks.task import Metric, Speed, TaskResult

FOLDER = "journal"
LOCK = "lock"
VERSION = 1
WHERE = "evaluate.run.results_dir"

# Results from a number on, in order, as plain values.
Send = Callable[[int], Iterator[Any]]


class Journal:
    """The results of one measurement; a context manager.

    stored: results of earlier runs
    counts: what those took: requests, seconds, tokens
    """

    def __init__(
        self,
        path: Path,
        set_up: Mapping[str, Any],
        measured_on: Mapping[str, Any],
        *,
        resume: bool = True,
    ) -> None:
        """set_up: what the results depend on; measured_on: what this run would measure on.

        Results of another set-up, or that are not to be used, are put aside as <name>.old.
        """
        self.path = path
        self.stored: list[Any] = []
        self.counts: dict[str, float] = {}
        self._head = json.loads(json.dumps({"journal": VERSION, "set_up": set_up}))
        self._measured_on = dict(measured_on)
        self._runs: list[dict[str, Any]] = []
        self._end = 0  # where the last whole line ends, in bytes
        self._file: IO[bytes] | None = None
        self._read(resume)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    @property
    def measured_on(self) -> dict[str, Any]:
        """Return the hardware of the last run with a result; `runs`: when each of them started."""
        last = self._runs[-1] if self._runs else self._measured_on
        return last | {"runs": [run["date"] for run in self._runs]}

    def continued(
        self, send: Send, counts: Callable[[], Mapping[str, float]] = dict
    ) -> Iterator[Any]:
        """The results of earlier runs, then what `send` gives from their number on.

        counts: what all results until now took
        """
        yield from self.stored
        for result in send(len(self.stored)):
            self.note(result, counts())
            yield result

    def note(self, result: Any, counts: Mapping[str, float] = MappingProxyType({})) -> None:
        """Write a result down, a plain value; counts: what all results until now took."""
        try:
            if self._file is None:
                self._file = self._opened()
            self._write({"result": result, **counts})
        except OSError as error:
            raise ConfigError(
                problem(f"cannot write {self.path}: {error}", change=WHERE)
            ) from error

    def _opened(self) -> IO[bytes]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.fdopen(os.open(self.path, flags, 0o666), "wb")
        self._file.truncate(self._end)
        self._file.seek(self._end)
        if not self._end:
            self._write(self._head)
        self._runs.append(self._measured_on)
        self._write({"run": self._measured_on})
        return self._file

    def _write(self, line: Mapping[str, Any]) -> None:
        """Whole lines reach the system at once: a killed process loses none."""
        if self._file is not None:
            text = json.dumps(line, ensure_ascii=False, allow_nan=False)
            self._file.write(text.encode("utf-8", "surrogatepass") + b"\n")
            self._file.flush()

    def _read(self, resume: bool) -> None:
        try:
            lines = self.path.read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(problem(f"cannot read {self.path}: {error}", change=WHERE)) from error
        values = list(_complete(lines))
        if not values:
            return
        reason = "evaluate.resume is False" if not resume else self._other(values[0])
        if reason is not None:
            old = self.path.with_name(f"{self.path.name}.old")
            self.path.replace(old)
            _say(f"{self.path.stem} starts over: {reason}; the results until now are in {old}")
            return
        for value in values[1:]:
            if "run" in value:
                self._runs.append(value["run"])
            else:
                self.stored.append(value.pop("result"))
                self.counts = value
        self._end = sum(map(len, lines[: len(values)]))
        began = f"begun {self._runs[0]['date']}" if self._runs else "begun before"
        _say(
            f"{self.path.stem} continues after {len(self.stored)} results of the evaluation {began}"
        )

    def _other(self, head: Any) -> str | None:
        """Why the results are of no use here; None where they are."""
        if not isinstance(head, dict) or head.get("journal") != VERSION:
            return f"{self.path} is not a journal of version {VERSION}"
        changed = value_differences(head.get("set_up"), self._head["set_up"])
        return "other " + ", ".join(name for name, *_ in changed) if changed else None


def _complete(lines: list[bytes]) -> Iterator[Any]:
    """The values of the lines until the first that is torn: a killed process may leave one."""
    for number, line in enumerate(lines):
        try:
            value = parse_json(line)
        except ValueError:
            return
        if not line.endswith(b"\n") or not isinstance(value, dict):
            return
        if number and not {"run", "result"} & set(value):
            return
        yield value


def value_differences(one: Any, other: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted name, value in one, value in the other) of all that differs; None: not there."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [*one, *(key for key in other if key not in one)]
        return [
            difference
            for key in keys
            for difference in value_differences(
                one.get(key), other.get(key), f"{name}.{key}".lstrip(".")
            )
        ]
    return [] if one == other else [(name, one, other)]


@contextlib.contextmanager
def locked(results_dir: Path) -> Iterator[Path]:
    """The folder of journals, which no other evaluation may use meanwhile.

    Raises ConfigError where one does. What is empty in the end is removed.
    """
    folder = results_dir / FOLDER
    path = folder / LOCK
    try:
        descriptor = _lock(path)
    except OSError as error:
        raise ConfigError(problem(f"cannot write {folder}: {error}", change=WHERE)) from error
    try:
        yield folder
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        for empty in (folder, results_dir):
            with contextlib.suppress(OSError):
                empty.rmdir()


def _lock(path: Path) -> int:
    """The locked file; whoever holds it removes it, so it must still have its name."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o666)
            try:
                _hold(descriptor, path)
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)


def _hold(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip()
        results_dir = path.parent.parent
        raise ConfigError(
            problem(
                f"another evaluation ({holder}) writes into {results_dir}",
                change=f"{WHERE}, or wait until it has ended",
            )
        ) from None
    except OSError as error:  # a file system without locks
        _say(f"{path} cannot be locked: {error}; let one evaluation alone write there")
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)


def remove_journals(folder: Path) -> None:
    """An evaluation is done: the next one asks everything again. What was put aside stays."""
    for kind in ("*.jsonl", "*.db"):  # the latter are lm_eval's
        for path in folder.glob(kind):
            path.unlink()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


FILE_NAME = "report.json"
SCHEMA = 1


def read_content(path: Path, change: str) -> dict[str, Any]:
    """The content of a report.json, or of the one in a folder.

    change: what names the file, for the error. Raises ConfigError for what is not a report.
    """
    file = report_file(path)
    if not file.exists():
        raise ConfigError(problem("there is no report", got=str(file), change=change))
    try:
        content = parse_json(read_plain(file))
        schema, _ = content["schema"], content["model"]
        if not isinstance(content["tasks"], dict):
            raise TypeError("its tasks are not a mapping")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            problem(f"{file} is not a report: {type(error).__name__}: {error}", change=change)
        ) from error
    if schema != SCHEMA:
        raise ConfigError(
            problem(f"{file} has another schema", got=schema, choices=[SCHEMA], change=change)
        )
    return dict(content)


def report_file(path: Path) -> Path:
    """The report.json that a path means: itself, or the one in the folder."""
    return path / FILE_NAME if path.is_dir() else path


def harness_tasks(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The tasks of lm-evaluation-harness, each with what they have in common: measured_on,
    settings and, unless it has its own, version.
    """
    harness = content.get("harness") or {}
    shared = {name: harness.get(name) for name in ("measured_on", "settings", "version")}
    return {name: {**shared, **task} for name, task in harness.get("tasks", {}).items()}


def harness_samples(task: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Read lm-evaluation-harness's output for each item of a task, below `folder`/harness.

    Its file of samples has a JSON object a line, with doc_id, target, the filter that the answer
    went through, and the item's own figures; index is (doc_id, filter). None where the file is
    gone; ConfigError for a damaged one.
    """
    path = folder / "harness" / str(task.get("samples"))
    try:
        lines = [parse_json(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        return [{**line, "index": (line["doc_id"], line.get("filter"))} for line in lines]
    except OSError:
        return []
    except (ValueError, KeyError, TypeError) as error:
        message = f"{path} is not a samples file: {type(error).__name__}: {error}"
        raise ConfigError(problem(message)) from error


def harness_items(task: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The items of a task of lm-evaluation-harness, in the order of its doc_id.

    Each has index (the doc_id), target, what the task's figures are made of, and prediction where a
    text was generated. What went through a filter has the filter's name behind its own, as figures
    have: exact_match,strict-match.
    """
    items: dict[int, dict[str, Any]] = {}
    for sample in harness_samples(task, folder):
        try:
            index = int(sample["doc_id"])
            item = items.setdefault(index, {"index": index, "target": str(sample["target"])})
            item.update(_answers(sample, task["metrics"]))
        except (ValueError, KeyError, TypeError) as error:
            message = (
                f"{task.get('samples')} is not a samples file: {type(error).__name__}: {error}"
            )
            raise ConfigError(problem(message, got=str(sample)[:100])) from error
    return [items[index] for index in sorted(items)]


def _answers(sample: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The answer that went through a filter, and its values; nothing where no figure is of it."""
    of_filter = sample.get("filter", "none")
    suffix = "" if of_filter == "none" else f",{of_filter}"
    names = [name for name in metrics if name.partition(",")[2] == suffix[1:]]
    result: dict[str, Any] = {}
    answers = sample.get("filtered_resps") or [None]
    if names and isinstance(answers[0], str):
        result[f"prediction{suffix}"] = answers[0]
    for name in names:
        value = sample.get(name.removesuffix(suffix))
        if isinstance(value, (bool, int, float)):
            right = metrics[name]["percent"] and value in (0, 1)
            result[name] = bool(value) if right else float(value)
    return result


def task_result(section: Mapping[str, Any]) -> TaskResult:
    """A task's section without its reference. Raises KeyError, TypeError or ValueError."""
    metrics = {name: Metric(**values) for name, values in section["metrics"].items()}
    items = [{**item, "index": int(item["index"])} for item in section["items"]]
    speed = Speed(**section["pace"]) if section.get("pace") else None
    return TaskResult(metrics, items, pace=speed)
