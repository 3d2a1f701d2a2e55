"""The kernels of models in real sizes fit into a GPU; none is needed to see that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.shapes import CONFIGS
from launcher_scripts.common.quantization import Quantization
from launcher_scripts.engine.messages.plan import Choice, Plan, StepShape
from launcher_scripts.engine.runner.kernel_precompiler import traced_runner
from launcher_scripts.engine.runner.loading import EngineSettings
from launcher_scripts.engine.runner.runner import Runner
from launcher_scripts.kernels.cuda.compiling import DotTile
from launcher_scripts.kernels.cuda.decode_attention import decode_attention
from launcher_scripts.kernels.cuda.dot import dot_product
from launcher_scripts.kernels.operands import AttentionScores, LayerCache, Linear
from launcher_scripts.models.adapters import LORA_TARGETS, Adapters
from tests.kernels.hopper import Hopper, hopper

__all__ = ["hopper"]

MAX_ROWS = 64


@torch.inference_mode()
def one_layer(
    name: str, data_type: str = "bf16", quantization: Quantization | None = None
) -> Runner:
    """A rank of the model's sizes: its layers are alike."""
    config = CONFIGS[name]
    counts = {field: 1 for field in ("num_layers", "num_decoder_layers") if hasattr(config, field)}
    alike = {**counts, "full_attention_layers": None}
    settings = EngineSettings(
        Path("nowhere"), data_type=data_type, max_batch_size=MAX_ROWS, quantization=quantization
    )
    return traced_runner(settings, replace(config, **alike))


@pytest.mark.parametrize(
    ("rows", "data_type", "quantization"),
    [(1, "bf16", None), (33, "bf16", None), (1, "fp32", "int4")],
)
def test_steps_of_the_smallest_model(
    hopper: Hopper, rows: int, data_type: str, quantization: Quantization | None
) -> None:
    runner = one_layer("126m", data_type, quantization)
    runner.execute(Plan(record=(StepShape(rows, 256, 0, Choice.GREEDY),)))
    assert ("gemv" if rows == 1 else "dot_rows") in hopper.loaded


def test_a_kernel_that_does_not_fit_is_seen(
    hopper: Hopper,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DotTile, "fitting", lambda tile, *_: tile._replace(stages=8))
    with pytest.raises(OutOfResources, match="shared memory"):
        one_layer("126m").execute(Plan(record=(StepShape(64, 256, 0, Choice.GREEDY),)))


@pytest.mark.parametrize(("rows", "rank"), [(1, 64), (64, 16), (33, 256)])
def test_lora_of_a_model_in_its_real_size(hopper: Hopper, rows: int, rank: int) -> None:
    """A step with adapters has one kernel more before its products, and those add the rest."""
    config = CONFIGS["8b-modern"]
    parts = Adapters(lora_names=("sql", "law"), lora_rank=rank, lora_targets=tuple(LORA_TARGETS))
    settings = EngineSettings(Path("nowhere"), data_type="bf16", max_batch_size=MAX_ROWS)
    runner = traced_runner(settings, replace(config, num_layers=1, parts=parts))
    runner.execute(Plan(record=(StepShape(rows, 256, 0, Choice.GREEDY),)))
    hopper.loaded.clear()
    runner.execute(Plan(record=(StepShape(rows, 256, 0, Choice.GREEDY, lora=True),)))
    products = {"gemv", "gemv_heads"} if rows == 1 else {"dot_rows"}
    assert {*hopper.loaded} == {"shrink"} | products


@pytest.mark.parametrize("scales", [torch.int16, torch.int32])
def test_four_bits_in_short_pieces(hopper: Hopper, scales: torch.dtype) -> None:
    """Of 45 periods of columns a piece has one, which is less than a line."""

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    weight, scale = tensor(96, 1440, dtype=torch.uint8), tensor(96, 90, dtype=scales)
    linear = Linear(weight, None, scale=scale, compute=torch.bfloat16)
    dot_product(tensor(3, linear.in_size), linear, "plain")
    assert hopper.loaded == ["dot_rows"]


@pytest.mark.parametrize(
    ("rows", "num_heads", "num_kv_heads", "head_size", "longest"),
    [(16, 32, 32, 64, 1024), (64, 96, 8, 192, 256), (64, 32, 8, 256, 1024), (128, 64, 1, 512, 256)],
)
def test_attention_of_many_rows(
    hopper: Hopper, rows: int, num_heads: int, num_kv_heads: int, head_size: int, longest: int
) -> None:
    """Many tiles are under way at once, which have to find room whatever the size of a head."""

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    cache = LayerCache(*(tensor(num_kv_heads, 4096, head_size) for _ in range(2)))
    places = tensor(rows, dtype=torch.int64)
    query, scores = tensor(rows, num_heads, head_size), AttentionScores(head_size**-0.5)
    decode_attention(query, cache, places, places, longest, scores, fresh=True)
    assert hopper.loaded == ["attend_grouped"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data_type", "quantization"),
    [
        ("bf16", None),
        ("bf16", "int8"),
        ("bf16", "fp8"),
        ("bf16", "int4"),
        ("bf16", "mxfp4"),
        ("fp32", None),
    ],
)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_measured_model(
    hopper: Hopper, name: str, data_type: str, quantization: Quantization | None
) -> None:
    runner = one_layer(name, data_type, quantization)
    runner.execute(Plan(record=tuple(runner.shapes_to_record())))
    assert len(hopper.loaded) > 20
