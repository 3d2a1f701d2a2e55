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
from launcher_scripts.models.family import ModelConfig
from launcher_scripts.parallel import Parallelism
from tests.engine.small_agm import agm_config
from tests.engine.small_bart import bart_config
from tests.engine.small_models import small_config
from tests.engine.small_t5 import t5_config
from tests.kernels.idle_device import idle_device

__all__ = ["idle_device"]

SHAPES = ("126m", "1.3b-modern", "t5-base")


SMALL = {
    "ALiBi": small_config(position_embedding="alibi"),
    "norms after the sums": small_config(norm_placement="post"),
    "normed embeddings": small_config(embedding_norm=True),
    "wide heads": small_config(head_size=160, num_heads=2, num_kv_heads=2),
    "an encoder": t5_config(encoder_only=True),
    "BART": bart_config(),
    "AGM": agm_config(),
}


@torch.inference_mode()
def foreseen(model: ModelConfig, **more: object) -> list[str]:
    """The names of the kernels that the first passes of a model need."""
    options = {"data_type": "bf16", "max_batch_size": 8, **more}
    settings = EngineSettings(Path("nowhere"), **options)
    config, kernels = shortened(model), ForeseenKernels()
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
    few = foreseen(CONFIGS[name], int8_mode=int8_mode)
    assert len(few) > 20
    for layers, tokens in ((2, 4095), (3, 2000)):
        monkeypatch.setattr(idle_runner, "LAYERS", layers)
        assert foreseen(CONFIGS[name], max_tokens=tokens, int8_mode=int8_mode) == few
    assert not idle_device.loaded


@pytest.mark.parametrize("data_type", ["bf16", "fp32"])
@pytest.mark.parametrize("name", SMALL)
def test_all_kinds_of_models(idle_device: IdleDevice, name: str, data_type: str) -> None:
    assert len(foreseen(SMALL[name], data_type=data_type, max_batch_size=80)) >= 5
    assert not idle_device.loaded


def test_ranks_that_are_not_there(idle_device: IdleDevice) -> None:
    two, model = Parallelism(2, 1), CONFIGS["126m"]
    alone = foreseen(model, parallelism=two)
    shared = foreseen(model, parallelism=two, enable_custom_all_reduce=True)
    more = {name for name, _ in set(shared) - set(alone)}
    assert more >= {"gemv_to_inboxes", "add_from_inbox", "exchange_best"}
    assert Counter(name for name, _ in alone)["dot_rows"] > 2
    assert not idle_device.loaded
