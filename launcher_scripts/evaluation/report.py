"""The report of an evaluation: report.json for programs, report.html for people.

Both steps of an evaluation add their section to the same report.json (docs/report.md says what
is in it), and report.html is made from it again. A section carries what it was measured on, so
sections of different days or servers may stand side by side. Steps that share a results folder
run one after another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from launcher_scripts.common.errors import ConfigError, problem
from launcher_scripts.common.files import (
    CHAIN,
    MANIFEST,
    DigestChain,
    atomic_write,
    file_digest,
    value_digest,
)
from launcher_scripts.common.packages import VERDICT_FILE
from launcher_scripts.common.tokenizer import (
    CHAT_TEMPLATE_FILES,
    GENERATION_FILE,
    OPTIONAL_FILES,
    chat_templates,
    tokenizer_files,
)
from launcher_scripts.config.evaluation import (
    BenchmarkSettings,
    HarnessSettings,
    LadderSettings,
    LoadSettings,
    ReferenceSettings,
    TaskSettings,
)
from launcher_scripts.config.settings import EvaluateSettings
from launcher_scripts.evaluation.gate import Verdict
from launcher_scripts.evaluation.harness import HarnessResult
from launcher_scripts.evaluation.journal import FILE_NAME, SCHEMA, read_content
from launcher_scripts.evaluation.load.figures import LoadRun, Saturation
from launcher_scripts.evaluation.page import html
from launcher_scripts.evaluation.speed import SpeedRow, step_reads
from launcher_scripts.evaluation.tables import LadderRow
from launcher_scripts.evaluation.tasks.task import TaskResult
from launcher_scripts.evaluation.twin.measurement import ReferenceResult

CHECKOUT = Path(__file__).resolve().parents[2]
# What figures are computed with, where a client has it: NeMo is asked without any.
CLIENT_PACKAGES = (
    *("numpy", "rouge_score", "sacrebleu", "sentencepiece", "tokenizers", "torch"),
    *("transformers", "tritonclient"),
)
# Where the server is and how long to wait for it: no figure depends on these.
_LOCATIONS = (
    *("ready_file", "results_dir", "ready_timeout", "request_timeout", "grpc_tls"),
    *("server_job_folder", "published_as", "resume", "steps"),
)


def digests(settings: EvaluateSettings, data: Iterable[str] = ()) -> dict[str, Any]:
    """BLAKE2b digests of 256 bits; null where there is no such thing.

    data:          of every file that was read, by its name
    tokenizer:     of the tokenizer's files, chat templates left out
    chat_template: of the tokenizer's templates
    manifest:      of the served checkpoint's manifest.json, which has the digest of every weight
    source:        of the checkpoints that were exported, as the manifest records them
    system_fingerprint: of both, as the gateway's responses have it
    configuration: of the settings, without where the server is and how long to wait for it
    reasons:       why one of them is null, by its name
    """
    folder = Path(settings.tokenizer_dir)
    reasons = {}
    of_files: dict[str, str | None] = {"tokenizer": None, "chat_template": None}
    chain: dict[str, Any] = dict.fromkeys(CHAIN)
    try:
        chain = DigestChain.of(folder).values()
    except (OSError, ValueError) as error:
        reasons["manifest"] = f"{folder / MANIFEST}: {getattr(error, 'strerror', error)}"
    try:
        of_files = tokenizer_digests(folder)
        if of_files["tokenizer"] is None:
            reasons["tokenizer"] = f"{folder} has no tokenizer"
    except (OSError, ValueError) as error:
        reasons["tokenizer"] = f"{folder}: {error}"
    result = {
        "data": _data(data),
        **of_files,
        **chain,
        "configuration": value_digest(_configuration(settings)),
    }
    return {**result, "reasons": reasons} if reasons else result


def tokenizer_digests(folder: Path) -> dict[str, str | None]:
    """Digests of a folder's tokenizer and of its chat templates; None without such files.

    Raises OSError or ValueError for what cannot be read.
    """
    files = {path.name: path.read_bytes() for path in tokenizer_files(folder)}
    templates = chat_templates(files)
    return {
        "tokenizer": value_digest(_of_tokenizer(files)) if files else None,
        "chat_template": value_digest(templates) if templates else None,
    }


def _data(files: Iterable[str]) -> dict[str, str]:
    """A file that cannot be read is left out: who reads it says why."""
    result = {}
    for file in files:
        with contextlib.suppress(OSError):
            result[Path(file).name] = file_digest(Path(file))
    return result


def _of_tokenizer(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the tokenizer's files, without the files for chats and for decoding."""
    left_out = (*CHAT_TEMPLATE_FILES, GENERATION_FILE)
    files_used: dict[str, Any] = {
        name: content.hex() for name, content in files.items() if name not in left_out
    }
    name = OPTIONAL_FILES[1]
    if name in files:
        config = json.loads(files[name])
        if isinstance(config, dict):
            config.pop("chat_template", None)
        files_used[name] = config
    return files_used


def _configuration(settings: EvaluateSettings) -> dict[str, Any]:
    values = dataclasses.asdict(settings)
    return {name: value for name, value in values.items() if name not in _LOCATIONS}


def data_files(task: TaskSettings) -> tuple[str, ...]:
    """Data files of a task."""
    target = task.generation.target_file
    return (task.data_file,) if target is None else (task.data_file, target)


def questions_of(task: TaskSettings) -> dict[str, Any]:
    """Return the task's settings that its questions depend on, besides the data."""
    left_out = ("data_file", "batch_size", "reference")
    values = dataclasses.asdict(task)
    return {name: value for name, value in values.items() if name not in left_out}


def client_versions() -> dict[str, str]:
    """Return the versions of installed CLIENT_PACKAGES."""
    result = {}
    for package in CLIENT_PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            result[package] = version(package)
    return result


def project_commit() -> str | None:
    """The checkout's commit, with -dirty where files are changed; None outside of git."""
    if not (CHECKOUT / ".git").exists():
        return None
    command = ["git", "-C", str(CHECKOUT), "describe", "--always", "--abbrev=40", "--dirty"]
    command += ["--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def set_up(measured_on: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
    """Return everything that answers depend on: a journal continues while this is unchanged.

    The server may have been started again, elsewhere, where a manifest says that it serves the same
    weights. Without one only the same start of a server is known to.

    settings: what the measurement asks, as plain values
    """
    server, result = measured_on["server"], dict(measured_on["digests"])
    same = {
        "versions": server.get("versions"),
        "devices": sorted(str(rank.get("device")) for rank in server.get("ranks", [])),
    }
    if result["manifest"] is None:
        same = {name: value for name, value in server.items() if name != "alive_at"}
    dropped = ("configuration", "reasons", "system_fingerprint", "source")
    return {
        **settings,
        **{name: value for name, value in result.items() if name not in dropped},
        "parameters": measured_on["parameters"],
        "server": same,
        "commit": measured_on["client"]["commit"],
        "client": {name: measured_on["client"].get(name) for name in CLIENT_PACKAGES},
    }


def reference_set_up(measured_on: Mapping[str, Any], path: Path, **settings: Any) -> dict[str, Any]:
    """Return everything that the answers of a reference in the folder or file `path` depend on."""
    return {
        **settings,
        "data": measured_on["digests"]["data"],
        "tokenizer": measured_on["digests"]["tokenizer"],
        "reference": files_of(path),
        "commit": measured_on["client"]["commit"],
        "client": {name: measured_on["client"].get(name) for name in CLIENT_PACKAGES},
    }


def files_of(path: Path) -> dict[str, str]:
    """The folder or file `path`, with a digest of its files' names, sizes and times."""
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    stamps = [
        (file.name, file.stat().st_size, file.stat().st_mtime_ns)
        for file in files
        if file.is_file()
    ]
    return {"path": str(path), "files": value_digest(stamps)}


class Report:
    """The report in one results folder; what is added is on disk when the call returns.

    A verdict is about what was measured until then, so opening a report for more withdraws it.
    """

    def __init__(self, results_dir: Path, model_name: str) -> None:
        """Raises ConfigError when the folder's report is another model's or is not a report."""
        self.results_dir = results_dir
        self.content: dict[str, Any] = {"schema": SCHEMA, "model": model_name, "tasks": {}}
        if self.json_file.exists():
            change = "evaluate.run.results_dir, or remove the file"
            self.content = read_content(self.json_file, change)
            if (model := self.content["model"]) != model_name:
                message = f"{self.json_file} is a report of another model than {model_name}"
                raise ConfigError(problem(message, got=model, change=change))
            self.content.pop("verdict", None)
        self.verdict_file.unlink(missing_ok=True)

    @property
    def json_file(self) -> Path:
        return self.results_dir / FILE_NAME

    @property
    def verdict_file(self) -> Path:
        return self.results_dir / VERDICT_FILE

    @property
    def html_file(self) -> Path:
        return self.results_dir / "report.html"

    def add_task(
        self, settings: TaskSettings, result: TaskResult, measured_on: dict[str, Any]
    ) -> None:
        """One task's section, in place of an earlier one, as all that follow."""
        section = _section(measured_on, settings, dataclasses.asdict(result))
        self.content["tasks"][settings.name] = section
        self._write()

    def add_speed(
        self, settings: BenchmarkSettings, rows: Sequence[SpeedRow], measured_on: dict[str, Any]
    ) -> None:
        """The speed sweep."""
        self._put("speed", _section(measured_on, settings, {"rows": _plain(rows)}))

    def add_twin(
        self, settings: ReferenceSettings, result: ReferenceResult, measured_on: dict[str, Any]
    ) -> None:
        """The comparison with the original."""
        self._put("twin", _section(measured_on, settings, dataclasses.asdict(result)))

    def add_harness(
        self, settings: HarnessSettings, result: HarnessResult, measured_on: dict[str, Any]
    ) -> None:
        """Add the results of lm_eval."""
        self._put("harness", _section(measured_on, settings, dataclasses.asdict(result)))

    def add_load(
        self,
        settings: LoadSettings,
        runs: Sequence[LoadRun],
        saturation: Saturation | None,
        measured_on: dict[str, Any],
    ) -> None:
        """The load test."""
        result = saturation and dataclasses.asdict(saturation)
        values = {"runs": _plain(runs), "saturation": result}
        self._put("load", _section(measured_on, settings, values))

    def add_ladder(
        self, settings: LadderSettings, rows: Sequence[LadderRow], selected: str | None, why: str
    ) -> None:
        """The comparison of a ladder's rungs."""
        values = {"rows": _plain(rows), "chosen": selected, "why": why}
        self._put("ladder", _section({"date": _now(), "client": _client()}, settings, values))

    def add_verdict(self, verdict: Verdict) -> None:
        """The verdict, and last of all beside the report as verdict.json."""
        values = dataclasses.asdict(verdict)
        self._put("verdict", values)
        text = json.dumps(values, indent=1, ensure_ascii=False)
        atomic_write(self.verdict_file, text + "\n")

    def _put(self, name: str, section: dict[str, Any]) -> None:
        self.content[name] = section
        self._write()

    def _write(self) -> None:
        self.results_dir.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.content, indent=1, ensure_ascii=False, allow_nan=False)
        atomic_write(self.json_file, text + "\n")
        # As it is read: JSON's keys are texts.
        atomic_write(self.html_file, html(json.loads(text)))


def _section(measured_on: dict[str, Any], settings: Any, values: dict[str, Any]) -> dict[str, Any]:
    return {"measured_on": measured_on, "settings": dataclasses.asdict(settings), **values}


def _plain(rows: Sequence[Any]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(row) for row in rows]


def measured_on(
    settings: EvaluateSettings,
    ready: dict[str, Any],
    *,
    data: Iterable[str] = (),
    parameters: Mapping[str, Any] | None = None,
    seeds: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """When, on what, against which server and from which machine a section is measured.

    data:       the files that were read for it
    parameters: the served model's, of its config.pbtxt
    seeds:      of what is random in it
    """
    return {
        "date": _now(),
        "protocol": ready.get("protocol", settings.protocol),
        "server": ready,
        "parameters": dict(parameters or {}),
        "digests": digests(settings, data),
        "seeds": dict(seeds or {}),
        "gpu_price": settings.gpu_price,
        "reads": step_reads(ready, settings.model_name),
        "client": _client(),
    }


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _client() -> dict[str, Any]:
    """This machine."""
    return {
        "host": platform.node(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "python": platform.python_version(),
        "commit": project_commit(),
        **client_versions(),
    }


def _processor() -> str:
    """The processor's name as Linux gives it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
