"""What a model's first passes launch, known without its weights, its layers or a GPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch

from benchmarks.shapes import CONFIGS
from launcher_scripts.engine import idle_runner
from launcher_scripts.engine.idle_runner import first_passes, shortened
from launcher_scripts.engine.loading import EngineSettings
from launcher_scripts.kernels.foreseen import ForeseenKernels
from launcher_scripts.kernels.idle_device import IdleDevice
from launcher_scripts.parallel import Parallelism
from tests.kernels.idle_device import idle_device

__all__ = ["idle_device"]

SHAPES = ("126m", "1.3b-modern", "t5-base")


@torch.inference_mode()
def foreseen(name: str, monkeypatch: pytest.MonkeyPatch, *, layers: int = 2, **more) -> list[str]:
    """The names of the kernels that the first passes of a measured model need."""
    monkeypatch.setattr(idle_runner, "LAYERS", layers)
    options = {"data_type": "bf16", "max_batch_size": 8, **more}
    settings = EngineSettings(Path("nowhere"), **options)
    config, kernels = shortened(CONFIGS[name]), ForeseenKernels()
    with kernels.noted():
        runner = idle_runner.idle_runner(settings, config)
        for plans in first_passes(runner, config):
            for plan in plans:
                runner.execute(plan)
    return sorted(kernels.names)


@pytest.mark.parametrize("int8_mode", [0, 1])
@pytest.mark.parametrize("name", SHAPES)
def test_neither_the_number_of_layers_nor_that_of_tokens_matters(
    idle_device: IdleDevice, monkeypatch: pytest.MonkeyPatch, name: str, int8_mode: int
) -> None:
    few = foreseen(name, monkeypatch, int8_mode=int8_mode)
    assert len(few) > 20
    for layers, tokens in ((2, 4095), (3, 2000)):
        more = {"layers": layers, "max_tokens": tokens, "int8_mode": int8_mode}
        assert foreseen(name, monkeypatch, **more) == few
    assert not idle_device.loaded


def test_ranks_that_are_not_there(idle_device: IdleDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    two = Parallelism(2, 1)
    alone = foreseen("126m", monkeypatch, parallelism=two)
    shared = foreseen("126m", monkeypatch, parallelism=two, enable_custom_all_reduce=True)
    more = {name for name, _ in set(shared) - set(alone)}
    assert more >= {"gemv_to_inboxes", "add_from_inbox", "exchange_best"}
    assert Counter(name for name, _ in alone)["dot_rows"] > 2
    assert not idle_device.loaded
