"""The kernels of models in real sizes fit into a GPU; none is needed to see that."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.shapes import CONFIGS
from launcher_scripts.engine.graphs import bucket_bounds
from launcher_scripts.engine.loading import Launches
from launcher_scripts.engine.plan import Bounds, Plan, PrefillPart, RowStart
from launcher_scripts.engine.runner import Runner
from launcher_scripts.engine.sampler import sampling_batch
from launcher_scripts.kernels import kernels_for
from launcher_scripts.kernels.dot_products import MOST_ROWS
from launcher_scripts.kernels.idle_device import IdleDevice
from launcher_scripts.kernels.tiles import DotTile
from launcher_scripts.models import family_of
from launcher_scripts.models.gpt import GPTConfig
from launcher_scripts.models.t5 import T5Config
from launcher_scripts.protocol import SamplingParameters
from tests.engine.small_models import runner_for
from tests.kernels.idle_device import idle_device

__all__ = ["idle_device"]

SOURCE = 200
EXTENT = 1200  # cache tokens of a row and its source
PROMPTS = ((1,), (40,), (64,), (65,), (300,), (7, 9, 30))


def one_layer(config: GPTConfig | T5Config, rows: int, data_type: str, int8_mode: int) -> Runner:
    """A rank of the model's sizes, its weights without values: its layers are alike."""
    config = replace(config, num_layers=1)
    if isinstance(config, T5Config):
        config = replace(config, num_decoder_layers=1)
    weights = {
        spec.tensor_name(layer): torch.empty(spec.shape_on(config, 1))
        for spec in family_of(config).weights(config)
        for layer in spec.layer_numbers(config)
    }
    _, runner = runner_for(
        config,
        weights,
        data_type=data_type,
        max_batch_size=rows,
        max_tokens=rows * EXTENT,
        int8_mode=int8_mode,
        launches=Launches(kernels_for("cuda")),
    )
    return runner


def row_starts(lengths: tuple[int, ...], source: int = 0) -> list[RowStart]:
    return [
        RowStart(
            slot,
            slot * EXTENT + source,
            (1,) * length,
            -1,
            SamplingParameters(),
            source=(1,) * source,
        )
        for slot, length in enumerate(lengths)
    ]


@torch.inference_mode()
def take_steps(runner: Runner, rows: int, source: int) -> None:
    """Decode steps of short and of long rows, and what comes after their last layer."""
    step, columns = runner.decoder.step, runner.states.columns
    slots = sampling_batch(row_starts((1,) * rows, source), runner.device).slots
    for context in (70, 1000):
        x = step.forward(columns, slots, bucket_bounds(Bounds(context, source)))
        step.logits(x)
        if rows <= MOST_ROWS and x.operand.dtype != torch.float32:  # others look ids up in tables
            step.greedy(x, columns, slots)


@pytest.mark.parametrize("rows", [1, 33])
def test_steps_of_the_smallest_model(idle_device: IdleDevice, rows: int) -> None:
    take_steps(one_layer(CONFIGS["126m"], rows, "bf16", 0), rows, 0)
    assert ("gemv" if rows == 1 else "dot_rows") in idle_device.loaded


def test_a_kernel_that_does_not_fit_is_seen(
    idle_device: IdleDevice,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DotTile, "fitting", lambda tile, *_: tile._replace(stages=8))
    with pytest.raises(OutOfResources, match="shared memory"):
        take_steps(one_layer(CONFIGS["126m"], 64, "bf16", 0), 64, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("data_type", "int8_mode"), [("bf16", 0), ("bf16", 1), ("fp32", 0)])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_measured_model(
    idle_device: IdleDevice, name: str, data_type: str, int8_mode: int
) -> None:
    source = SOURCE if isinstance(CONFIGS[name], T5Config) else 0
    for rows in (1, 2, 17, 33, 64):
        take_steps(one_layer(CONFIGS[name], rows, data_type, int8_mode), rows, source)
    runner = one_layer(CONFIGS[name], 4, data_type, int8_mode)
    for lengths in PROMPTS:
        starts = row_starts(lengths, source)
        encode = tuple(row.slot for row in starts) if source else ()
        parts = () if source else tuple(PrefillPart(r.slot, 0, len(r.ids)) for r in starts)
        runner.execute(Plan(starts=tuple(starts), encode=encode, prefill=parts))
    assert idle_device.loaded
