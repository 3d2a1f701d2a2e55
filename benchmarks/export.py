"""How long the export of a 345M GPT takes, beside `cp` of the same file in the same run.

    python3 benchmarks/export.py [--runs 5] [--folder /fast/disk] [--tp-size 8]

Makes a .nemo file of random weights (24 layers of 1024, 16 heads, vocabulary 50304: 1.4 GB in
fp32), then alternates `cp` and exports to fp32 and to fp16, each into a fresh folder with the
file in the page cache and the disk settled before. Prints medians and the peak memory of the
export's process tree (proportional set size, sampled).
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import yaml

CHECKOUT = Path(__file__).resolve().parent.parent
LAYERS, HIDDEN, HEADS, FFN, VOCAB, POSITIONS = 24, 1024, 16, 4096, 50304, 1024
SAMPLE_SECONDS = 0.02
STATED_LIMIT = 4.0


@dataclass
class Measurement:
    """Seconds and peak MiB of every run of one thing."""

    name: str
    seconds: list[float] = field(default_factory=list)
    mebibytes: list[float] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tp-size", type=int, default=8)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--folder", type=Path, default=None, help="where to work")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        source = folder / "gpt_345m.nemo"
        make_checkpoint(source)
        print(f"{source.stat().st_size / 1e9:.2f} GB, {os.cpu_count()} CPUs, {platform.platform()}")
        report(measure(source, folder, arguments), source)
    return 0


def measure(source: Path, folder: Path, arguments: argparse.Namespace) -> list[Measurement]:
    """cp, fp32 and fp16 in turn, so that a noisy machine disturbs all of them."""
    rows = [Measurement("cp"), Measurement("fp32"), Measurement("fp16")]
    for _ in range(arguments.runs):
        for row in rows:
            target = folder / "target"
            if row.name == "cp":
                command = ["cp", str(source), str(target)]
            else:
                settings = write_settings(source, target, row.name, arguments)
                step = "launcher_scripts.steps.convert_checkpoint"
                command = [sys.executable, "-m", step, "--settings", str(settings)]
            os.sync()
            seconds, peak = timed(command)
            row.seconds.append(seconds)
            row.mebibytes.append(peak)
            remove(target)
    return rows


def write_settings(source: Path, target: Path, data_type: str, options: argparse.Namespace) -> Path:
    path = target.with_name("settings.yaml")
    values = {
        "model_name": "gpt",
        "model_type": "gpt3",
        "checkpoint_path": str(source),
        "triton_model_dir": str(target),
        "parallelism": {"tp_size": options.tp_size, "pp_size": 1},
        "weight_data_type": data_type,
        "processes": options.processes,
        "tokenizer": {"source": "none"},
    }
    path.write_text(yaml.safe_dump(values))
    return path


def timed(command: list[str]) -> tuple[float, float]:
    """Seconds a command runs, and the most MiB its process tree holds."""
    start = time.perf_counter()
    log = tempfile.TemporaryFile()  # noqa: SIM115 read and closed below
    process = subprocess.Popen(command, cwd=CHECKOUT, stdout=log, stderr=log)
    peak = [0.0]
    done = threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLE_SECONDS):
            peak[0] = max(peak[0], sum(proportional_mebibytes(pid) for pid in tree(process.pid)))

    sampler = threading.Thread(target=sample)
    sampler.start()
    status = process.wait()
    seconds = time.perf_counter() - start
    done.set()
    sampler.join()
    with log:
        log.seek(0)
        output = log.read().decode()
    if status:
        raise SystemExit(f"{command} failed with status {status}:\n{output}")
    return seconds, peak[0]


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


def proportional_mebibytes(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def report(rows: list[Measurement], source: Path) -> None:
    copy = statistics.median(rows[0].seconds)
    largest = VOCAB * HIDDEN * 4 / 2**20
    print(f"{'':6}{'median s':>10}{'x cp':>8}{'min s':>8}{'max s':>8}{'peak MiB':>10}")
    for row in rows:
        median = statistics.median(row.seconds)
        print(
            f"{row.name:6}{median:10.2f}{median / copy:8.2f}{min(row.seconds):8.2f}"
            f"{max(row.seconds):8.2f}{max(row.mebibytes):10.0f}"
        )
    print(
        f"limits: {STATED_LIMIT:.0f} x cp; {2 * largest + 300:.0f} MiB for one process "
        f"(2 x the largest tensor of {largest:.0f} MiB + 300 MiB); {source.name} in fp32"
    )


def make_checkpoint(path: Path) -> None:
    """A classic NeMo GPT with random weights, as one plain tar."""
    weights = path.with_name("model_weights.ckpt")
    torch.save(OrderedDict(state_dict()), weights)
    config = path.with_name("model_config.yaml")
    config.write_text(
        yaml.safe_dump(
            {
                "num_layers": LAYERS,
                "hidden_size": HIDDEN,
                "ffn_hidden_size": FFN,
                "num_attention_heads": HEADS,
                "max_position_embeddings": POSITIONS,
                "tensor_model_parallel_size": 1,
                "pipeline_model_parallel_size": 1,
                "nemo_version": "1.18.1",
            }
        )
    )
    with tarfile.open(path, "w") as archive:
        for file in (config, weights):
            archive.add(file, f"./{file.name}")
            file.unlink()


def state_dict() -> Iterator[tuple[str, torch.Tensor]]:
    random = np.random.default_rng(0)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.from_numpy(random.standard_normal(shape, np.float32) * np.float32(0.02))

    stem = "model.language_model."
    yield f"{stem}embedding.word_embeddings.weight", tensor(VOCAB, HIDDEN)
    yield f"{stem}embedding.position_embeddings.weight", tensor(POSITIONS, HIDDEN)
    for layer in range(LAYERS):
        for name, shape in (
            ("input_layernorm", (HIDDEN,)),
            ("self_attention.query_key_value", (3 * HIDDEN, HIDDEN)),
            ("self_attention.dense", (HIDDEN, HIDDEN)),
            ("post_attention_layernorm", (HIDDEN,)),
            ("mlp.dense_h_to_4h", (FFN, HIDDEN)),
            ("mlp.dense_4h_to_h", (HIDDEN, FFN)),
        ):
            yield f"{stem}encoder.layers.{layer}.{name}.weight", tensor(*shape)
            yield f"{stem}encoder.layers.{layer}.{name}.bias", tensor(shape[0])
    for part in ("weight", "bias"):
        yield f"{stem}encoder.final_layernorm.{part}", tensor(HIDDEN)


if __name__ == "__main__":
    sys.exit(main())
