"""LoRA of parameters that hold all experts of a layer (PEFT's target_parameters)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.exporting import refused_export
from tests.checkpoint.peft_maker import PeftMaker
from tests.checkpoint.test_peft import MODELS as DENSE
from tests.checkpoint.test_peft import check_merged, layers
from tests.checkpoint.tiny_models import LATER_DECODERS as MODELS


def _experts(*names: str, **more: Any) -> Callable[[PeftMaker], None]:
    """LoRA of parameters that hold all experts of a layer, and of the queries."""

    def make(maker: PeftMaker) -> None:
        for name in [name for name in maker.merged if name.endswith("experts.down_proj")]:
            maker.experts(name.removesuffix(".down_proj"), *names, **{"scale": 2.0, **more})
        layers("q_proj")(maker)

    return make


def _router_and_experts(maker: PeftMaker) -> None:
    _experts("gate_up_proj")(maker)
    for name in [name for name in maker.merged if name.endswith("mlp.gate.weight")]:
        maker.lora(name.removesuffix(".weight"), 2.0)


STACKED = {"target_modules": ["q_proj"], "target_parameters": ["gate_up_proj", "down_proj"]}

CASES: dict[str, tuple[str, Callable[[PeftMaker], None], dict[str, Any]]] = {
    "experts": ("qwen3_moe", _experts("gate_up_proj", "down_proj"), STACKED),
    "experts_of_mixtral": (
        "mixtral",
        _experts("down_proj", scale=5 / 3, rank=3),
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.down_proj"],
            "rank_pattern": {"experts.down_proj": 3},
            "alpha_pattern": {"experts.down_proj": 5},
        },
    ),
    "experts_in_turn": ("gpt_oss", _experts("gate_up_proj", "down_proj"), STACKED),
    "experts_of_0.18": (
        "granitemoe",
        _experts("gate_up_proj", "down_proj", swapped=True),
        {**STACKED, "peft_version": "0.18.1"},
    ),
    "experts_and_router": (
        "glm4_moe",
        _router_and_experts,
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.gate.weight"],
        },
    ),
    "all_but_experts": (
        "mixtral",
        layers("q_proj", "k_proj", "v_proj", "o_proj"),
        {"target_modules": "all-linear"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_merged_model_is_what_its_formula_says(tmp_path: Path, name: str) -> None:
    kind, make, config = CASES[name]
    check_merged(tmp_path, MODELS[kind], make, **config)


@pytest.mark.parametrize(
    ("config", "names", "words"),
    [
        ({}, ("down_proj",), "LoRA of 1 parameters of model.layers.0.mlp.experts does not fit"),
        (
            {"target_parameters": ["down_proj"]},
            ("gate_up_proj",),
            r"layers\.0\.mlp\.experts\.down_proj does not fit; got .*'A': \(28, 16\)",
        ),
        (
            {"target_parameters": ["down_proj"], "r": 8},
            ("down_proj",),
            "experts.down_proj has another rank; got 4; choices: 8",
        ),
    ],
)
def test_lora_of_experts_that_does_not_fit(tmp_path: Path, config, names, words) -> None:
    model = MODELS["qwen3_moe"].save(tmp_path / "base")
    maker = PeftMaker(model)
    _experts(*names)(maker)
    adapter = maker.write(tmp_path / "adapter", **{**STACKED, **config})
    refused_export(tmp_path / "base", tmp_path, words, adapter_checkpoints=(adapter,))


@pytest.mark.parametrize("version", ["0.18.1", None])
def test_square_experts_of_a_peft_that_may_have_swapped_them(tmp_path: Path, version) -> None:
    tiny = MODELS["qwen3_moe"]
    square = dataclasses.replace(tiny, values=tiny.values | {"moe_intermediate_size": 8})
    maker = PeftMaker(square.save(tmp_path / "base"))
    _experts("gate_up_proj", "down_proj")(maker)
    adapter = maker.write(tmp_path / "adapter", **{**STACKED, "peft_version": version})
    words = r"gate_up_proj, which is square: a PEFT before 0\.20 may have swapped A and B"
    refused_export(tmp_path / "base", tmp_path, words, adapter_checkpoints=(adapter,))


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_a_base_without_experts(tmp_path: Path, kind: str) -> None:
    DENSE[kind].save(tmp_path / "base")
    maker = PeftMaker(MODELS["qwen3_moe"].make())
    _experts("gate_up_proj", "down_proj")(maker)
    adapter = maker.write(tmp_path / "adapter", **STACKED)
    words = r"layers\.0\.mlp\.experts\.gate_up_proj: the base has no experts"
    refused_export(tmp_path / "base", tmp_path, words, adapter_checkpoints=(adapter,))


def test_lora_of_experts_can_only_be_merged(tmp_path: Path) -> None:
    maker = PeftMaker(MODELS["mixtral"].save(tmp_path / "base"))
    _experts("gate_up_proj", "down_proj")(maker)
    adapter = maker.write(tmp_path / "adapter", **STACKED)
    words = r"experts\.0\.gate_proj\.weight can only be merged"
    refused_export(tmp_path / "base", tmp_path, words, lora_checkpoints=(adapter,))
