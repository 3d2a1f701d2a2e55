"""Kernels are compiled by other processes while a rank loads; a GPU is not needed for that."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

from launcher_scripts.engine import ahead
from launcher_scripts.engine.ahead import CompileOrder, KernelsAhead, compile_order, how_many
from launcher_scripts.engine.engine import Engine
from launcher_scripts.engine.loading import EngineSettings
from launcher_scripts.engine.timeline import Timeline
from launcher_scripts.errors import CheckpointError
from launcher_scripts.parallel import Parallelism
from tests.engine.small_models import (
    generate,
    random_tensors,
    small_config,
    write_checkpoint,
)

HOPPER = ((9, 0), 227 << 10)
CONFIG = small_config(hidden_size=64, num_heads=1, num_kv_heads=1, head_size=64, max_positions=128)
SECONDS = 300.0


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    """An engine of one row in float32, which needs few kernels."""
    folder = tmp_path_factory.mktemp("model") / "1-gpu"
    write_checkpoint(folder, CONFIG, random_tensors(CONFIG), 1)
    return EngineSettings(folder, max_batch_size=1)


@pytest.fixture(scope="module")
def order(
    settings: EngineSettings, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CompileOrder]:
    """What is asked of the program, with an empty folder to compile into."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        yield replace(compile_order(settings, CONFIG, *HOPPER), processes=2)


@pytest.fixture
def kernels() -> Iterator[KernelsAhead]:
    started = KernelsAhead()
    yield started
    started.close()


def until(condition) -> None:
    late = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < late
        time.sleep(0.02)


def status(pid: int) -> tuple[str, int] | None:
    """State and parent of a process; None when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[1])


def lives(pid: int) -> bool:
    found = status(pid)
    return found is not None and found[0] != "Z"


def children(pid: int) -> set[int]:
    """All processes below one, as far as they live."""
    everyone = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    states = {each: status(each) for each in everyone}
    own = {each for each, found in states.items() if found and found[0] != "Z" and found[1] == pid}
    return own.union(*map(children, own))


COMPILES_NOTHING = """
import sys
from pathlib import Path
import torch
from triton import knobs
from launcher_scripts.engine.idle_runner import first_passes, idle_runner
from launcher_scripts.engine.loading import EngineSettings, open_checkpoint
from launcher_scripts.kernels.device_traits import DeviceTraits
from launcher_scripts.kernels.idle_arithmetic import IdleArithmetic
from launcher_scripts.kernels.idle_device import IdleDevice, work_on

found = []
knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)
settings = EngineSettings(Path(sys.argv[1]), max_batch_size=1, max_tokens=16 * 5 - 1)
device = IdleDevice(DeviceTraits((9, 0), 227 << 10))
work_on(device)
with torch.inference_mode(), IdleArithmetic():
    config = open_checkpoint(settings, verify=False).config
    runner = idle_runner(settings, config)
    passes = [plan for plans in first_passes(runner, config) for plan in plans]
    for plan in reversed(passes[2:]) if "backwards" in sys.argv else passes:
        runner.execute(plan)
print(len(found), len(device.loaded), sum(found))
"""


def test_a_rank_finds_all_that_it_needs_compiled(
    order: CompileOrder, kernels: KernelsAhead, checkout: Path, capfd
) -> None:
    """Whichever kernel it launches first, and whatever its cache holds."""
    kernels.begin(order)
    timeline = Timeline()
    kernels.wait(timeline, SECONDS)
    assert [what for what, _ in timeline.events] == ["the first kernels are compiled"]
    until(order.marker.exists)
    until(lambda: kernels.shapes == math.inf)
    assert "compiled when they are needed" not in capfd.readouterr().out
    for way in ("forwards", "backwards"):
        done = subprocess.run(
            [sys.executable, "-c", COMPILES_NOTHING, str(order.settings.checkpoint_dir), way],
            env={**os.environ, "PYTHONPATH": str(checkout)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        needed, loaded, hits = map(int, done.stdout.split())
        assert needed == loaded == hits > 10
    again = KernelsAhead()
    again.begin(order)
    again.wait(timeline)
    assert again.shapes == math.inf
    assert len(timeline.events) == 1


def test_an_engine_waits_for_the_first_and_ends_the_program(
    order: CompileOrder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    own = replace(order, marker=tmp_path / "marker")
    monkeypatch.setattr(KernelsAhead, "start", lambda kernels, *_: kernels.begin(own))
    before = children(os.getpid())
    engine = Engine.load(replace(order.settings, device="cpu"))
    try:
        assert len(generate(engine, (1, 2), 3)) == 3
    finally:
        engine.close()
    steps = [what for what, _ in engine.timeline.events]
    assert steps.index("rank 0 has its weights") < steps.index("the first kernels are compiled")
    assert steps.index("the first kernels are compiled") < steps.index("all ranks are ready")
    assert "kernels compiled ahead: " in capfd.readouterr().out
    assert children(os.getpid()) <= before


def test_an_altered_checkpoint_ends_the_program(
    order: CompileOrder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path / "1-gpu", CONFIG, random_tensors(CONFIG), 1)
    weight = next(folder.glob("*dense_h_to_4h.weight*"))
    weight.write_bytes(bytes(weight.stat().st_size))
    own = replace(order, marker=tmp_path / "marker")
    monkeypatch.setattr(KernelsAhead, "start", lambda kernels, *_: kernels.begin(own))
    before = children(os.getpid())
    with pytest.raises(CheckpointError, match=weight.name):
        Engine.load(EngineSettings(folder, device="cpu"))
    assert children(os.getpid()) <= before


def test_nothing_is_left_of_it_after_the_end(
    order: CompileOrder, kernels: KernelsAhead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    before = children(os.getpid())
    kernels.begin(replace(order, marker=tmp_path / "marker"))
    until(lambda: len(children(os.getpid()) - before) >= 3)
    started = children(os.getpid()) - before
    kernels.close()
    until(lambda: not any(map(lives, started)))
    until(lambda: kernels.shapes == math.inf)


def test_nothing_is_left_of_it_when_the_rank_is_killed(
    order: CompileOrder, checkout: Path, tmp_path: Path
) -> None:
    text = (
        "import sys, time\nfrom pathlib import Path\n"
        "from launcher_scripts.engine.ahead import CompileOrder, KernelsAhead\n"
        "from launcher_scripts.engine.loading import EngineSettings\n"
        "settings = EngineSettings(Path(sys.argv[1]), max_batch_size=1)\n"
        "marker = Path(sys.argv[2])\n"
        "KernelsAhead().begin(CompileOrder(settings, (9, 0), 232448, 2, marker))\n"
        "time.sleep(600)\n"
    )
    folder = order.settings.checkpoint_dir
    rank = subprocess.Popen(
        [sys.executable, "-c", text, str(folder), str(tmp_path / "marker")],
        env={
            **os.environ,
            "PYTHONPATH": str(checkout),
            "TRITON_CACHE_DIR": str(tmp_path / "kernels"),
        },
    )
    try:
        until(lambda: len(children(rank.pid)) >= 3)
        started = children(rank.pid)
    finally:
        rank.send_signal(signal.SIGKILL)
        rank.wait()
    until(lambda: not any(map(lives, started)))


def test_a_failure_is_said_and_nothing_waits(
    order: CompileOrder, kernels: KernelsAhead, tmp_path: Path, capfd
) -> None:
    broken = replace(order.settings, checkpoint_dir=tmp_path / "nowhere")
    kernels.begin(replace(order, settings=broken, marker=tmp_path / "marker"))
    kernels.wait(Timeline(), SECONDS)
    assert kernels.shapes == math.inf
    said = capfd.readouterr()
    assert "kernels are compiled when they are needed: what compiles them ahead ended" in said.out
    assert "nowhere" in said.err
    assert not (tmp_path / "marker").exists()


def test_nothing_waits_for_a_program_that_talks_nonsense(
    order: CompileOrder, kernels: KernelsAhead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "PROGRAM", "this")  # prints a poem

    def nobody_hears(why: str) -> None:
        raise BrokenPipeError(why)

    monkeypatch.setattr(ahead, "_say", nobody_hears)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    kernels.begin(replace(order, marker=tmp_path / "marker"))
    kernels.wait(Timeline(), SECONDS)
    assert kernels.shapes == math.inf


def test_what_has_no_use(order: CompileOrder, kernels: KernelsAhead, tmp_path: Path, capsys):
    marker = tmp_path / "marker"
    kernels.begin(replace(order, processes=0, marker=marker))
    assert "fewer than 4 cores" in capsys.readouterr().out
    staged = replace(order.settings, parallelism=Parallelism(1, 2))
    kernels.begin(replace(order, settings=staged, marker=marker))
    assert "pipeline stages" in capsys.readouterr().out
    kernels.wait(Timeline())
    assert kernels.shapes == math.inf


def test_what_a_marker_stands_for(settings: EngineSettings) -> None:
    changes = (
        compile_order(replace(settings, data_type="bf16"), CONFIG, *HOPPER),
        compile_order(replace(settings, int8_mode=1), CONFIG, *HOPPER),
        compile_order(replace(settings, max_batch_size=2), CONFIG, *HOPPER),
        compile_order(settings, replace(CONFIG, ffn_size=96), *HOPPER),
        compile_order(settings, CONFIG, (10, 0), 227 << 10),
        compile_order(settings, CONFIG, (9, 0), 99 << 10),
    )
    same = compile_order(replace(settings, max_tokens=999, verify=False), CONFIG, *HOPPER)
    own = compile_order(settings, CONFIG, *HOPPER).marker
    assert same.marker == own
    assert len({own, *(order.marker for order in changes)}) == 1 + len(changes)


@pytest.mark.parametrize(
    ("cores", "ranks", "processes"),
    [(2, 1, 0), (4, 1, 2), (16, 1, 8), (16, 2, 4), (16, 8, 1), (6, 8, 1), (128, 8, 8)],
)
def test_how_many_processes_compile(cores: int, ranks: int, processes: int) -> None:
    assert how_many(cores, ranks) == processes
