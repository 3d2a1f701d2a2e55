"""How long exports take, beside `cp` of the same bytes in the same run, and how much memory.

    python3 benchmarks/export.py [--case gpt] [--layers 24] [--types fp16] [--folder /fast/disk]
        [--format huggingface]

Makes a checkpoint of a real shape (export_sources.py; `gpt` with 24 layers is the 345M GPT, 1.4 GB
in fp32), then alternates `cp` and exports to every type, each into a fresh folder with the
source in the page cache and the disk settled before. Prints medians, minima, ratios to `cp` and
the peak memory of the export's process tree (proportional set size, sampled); mapped pages of the
source count, so `private` is what the export holds itself. --save keeps all runs, with the machine,
in results/export-<case>-<file system>.json.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from export_sources import SOURCES, BenchmarkSource

CHECKOUT = Path(__file__).resolve().parent.parent
EXPORT_FORMATS = ("fastertransformer", "huggingface")
SAMPLE_SECONDS = 0.02
TYPES = ("fp32", "fp16", "bf16")
GOAL = 2.0  # times `cp`


@dataclass
class Measurement:
    """Seconds (clock, processors) and peak MiB (all, private) of the runs of one thing."""

    name: str
    seconds: list[float] = field(default_factory=list)
    processor_seconds: list[float] = field(default_factory=list)
    mebibytes: float = 0.0
    private: float = 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=SOURCES, default="gpt")
    parser.add_argument("--layers", type=int, default=24, help="of each stack")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tp-size", type=int, default=8)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--format", choices=EXPORT_FORMATS, default=EXPORT_FORMATS[0])
    parser.add_argument("--no-source-digest", action="store_true", help="as of sources over 8 GiB")
    parser.add_argument("--folder", type=Path, default=None, help="where to work")
    parser.add_argument("--save", action="store_true", help="keep the figures in results/")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        source = SOURCES[arguments.case](folder, arguments.layers)
        files = [source.path] if source.path.is_file() else source.path.rglob("*")
        size = sum(file.stat().st_size for file in files if file.is_file())
        where = machine(folder)
        print(
            f"{arguments.case}, {arguments.layers} layers: {size / 1e9:.2f} GB "
            f"to {arguments.format}, TP {arguments.tp_size}, {where['cpus']} CPUs "
            f"({where['cpu']}, load {where['load']}), {where['file system']}, {where['platform']}"
        )
        rows = measure(source, folder, arguments)
        report(rows, source)
        if arguments.save:
            save(rows, size, where, arguments)
    return 0


def machine(folder: Path) -> dict[str, Any]:
    """What the figures depend on."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    around = [mount for mount in mounts if folder.resolve().is_relative_to(mount[0])]
    models = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    return {
        "cpu": next(iter(models), platform.machine()),
        "cpus": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "file system": max(around, key=lambda mount: len(mount[0]))[1],
        "platform": platform.platform(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("numpy", "blake3")},
    }


def save(
    rows: list[Measurement], size: int, where: dict[str, Any], arguments: argparse.Namespace
) -> None:
    values = {
        "machine": where,
        "case": arguments.case,
        "layers": arguments.layers,
        "format": arguments.format,
        "tp_size": arguments.tp_size,
        "source_bytes": size,
        "runs": [asdict(row) for row in rows],
    }
    prefix = "export" if arguments.format == EXPORT_FORMATS[0] else arguments.format
    name = f"{prefix}-{arguments.case}-{where['file system']}.json"
    text = json.dumps(values, indent=1, default=float) + "\n"
    (CHECKOUT / "benchmarks" / "results" / name).write_text(text)


def measure(
    source: BenchmarkSource, folder: Path, arguments: argparse.Namespace
) -> list[Measurement]:
    """`cp` and every type in turn, so that a noisy machine disturbs all of them.

    Memory is sampled in a run of its own: looking at a process takes time of its processors.
    """
    rows = [Measurement(name) for name in ("cp", *arguments.types)]
    for number in range(arguments.runs + 1):
        for row in rows:
            target = folder / "target"
            if row.name == "cp":
                command = ["cp", "-r", str(source.path), str(target)]
            else:
                settings = write_settings(source, target, row.name, arguments)
                step = "launcher_scripts.steps.convert_checkpoint"
                command = [sys.executable, "-m", step, "--settings", str(settings)]
            os.sync()
            if number < arguments.runs:
                before = processor_seconds()
                row.seconds.append(run(command)[0])
                row.processor_seconds.append(processor_seconds() - before)
            else:
                row.mebibytes, row.private = run(command, sampled=True)[1:]
            empty(target)
            target.rename(folder / f"emptied{number}_{row.name}")
    return rows


def write_settings(
    source: BenchmarkSource, target: Path, data_type: str, options: argparse.Namespace
) -> Path:
    path = target.with_name("settings.yaml")
    values = {
        "model_name": "gpt",
        "model_type": "",
        "checkpoint_path": str(source.path),
        "triton_model_dir": str(target),
        "parallelism": {"tp_size": options.tp_size, "pp_size": 1},
        "weight_data_type": data_type,
        "processes": options.processes,
        "tokenizer": {"source": "none"},
        "format": options.format,
        "huggingface": {"folder": str(target)},
        "digest_source": False if options.no_source_digest else None,
        **source.settings,
    }
    path.write_text(yaml.safe_dump(values))
    return path


def run(command: list[str], *, sampled: bool = False) -> tuple[float, float, float]:
    """Seconds a command runs; `sampled`, the most MiB its processes hold, and hold alone."""
    start = time.perf_counter()
    log = tempfile.TemporaryFile()  # noqa: SIM115 read and closed below
    # As in an installation, Python keeps the modules it has compiled.
    env = {key: os.environ[key] for key in os.environ if key != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(command, cwd=CHECKOUT, env=env, stdout=log, stderr=log)
    peaks = {"Pss:": 0.0, "Pss_Anon:": 0.0}
    while sampled and process.poll() is None:
        found = [proportional_mebibytes(pid) for pid in tree(process.pid)]
        for key in peaks:
            peaks[key] = max(peaks[key], sum(each.get(key, 0.0) for each in found))
        time.sleep(SAMPLE_SECONDS)
    status = process.wait()
    seconds = time.perf_counter() - start
    with log:
        log.seek(0)
        output = log.read().decode()
    if status:
        raise SystemExit(f"{command} failed with status {status}:\n{output}")
    return seconds, peaks["Pss:"], peaks["Pss_Anon:"]


def processor_seconds() -> float:
    """What the finished commands have used of all processors together."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def tree(pid: int) -> Iterator[int]:
    """A process and all its descendants."""
    yield pid
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [c for task in tasks for c in (task / "children").read_text().split()]
    except OSError:
        return
    for child in children:
        yield from tree(int(child))


def proportional_mebibytes(pid: int) -> dict[str, float]:
    """The rows of smaps_rollup that say Pss; {} for a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return {}
    rows = (line.split() for line in lines if line.startswith("Pss"))
    return {row[0]: int(row[1]) / 1024 for row in rows}


def empty(path: Path) -> None:
    """Give space and memory back, but keep the names.

    ext4 looks at every file deleted in the last minutes again before it makes one: files that are
    deleted between the runs would cost the next run's more than writing does.
    """
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            os.truncate(file, 0)


def report(rows: list[Measurement], source: BenchmarkSource) -> None:
    copy = rows[0]
    titles = ("median s", "x cp", "goal", "min s", "x cp", "CPU s", "x cp", "peak MiB", "private")
    print(" " * 6 + "".join(f"{title:>9}" for title in titles))
    for row in rows:
        cells = [statistics.median(row.seconds), statistics.median(row.seconds)]
        cells[1] /= statistics.median(copy.seconds)
        target = f"{GOAL:.1f}" if row.name in TYPES else ""
        least = [min(row.seconds), min(row.seconds) / min(copy.seconds)]
        used = statistics.median(row.processor_seconds)
        least += [used, used / statistics.median(copy.processor_seconds)]
        print(
            f"{row.name:6}"
            + "".join(f"{cell:9.2f}" for cell in cells)
            + f"{target:>9}"
            + "".join(f"{cell:9.2f}" for cell in least)
            + f"{row.mebibytes:9.0f}{row.private:9.0f}"
        )
    print(f"the largest tensor has {source.largest / 2**20:.0f} MiB in fp32")


if __name__ == "__main__":
    sys.exit(main())
