"""Prompts, IA3, adapters, weights in bytes, Agm and BART on CUDA against the same on the CPU."""

from __future__ import annotations

from concurrent.futures import wait
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from launcher_scripts.common.quantization import Quantization
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.engine import Engine
from launcher_scripts.models.adapters import LORA_TARGETS, Adapters, PromptTask
from tests.engine.small_agm import agm_config, agm_tensors
from tests.engine.small_bart import bart_config
from tests.engine.small_models import engine_for, random_tensors, small_config
from tests.engine.small_t5 import NEMO, t5_config, t5_tensors

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

VOCAB, OUTPUT_LEN = 515, 20
TEXT = tuple((7 * i) % 500 for i in range(23))
PARTS = Adapters(
    prompt_tasks=(PromptTask("squad", 3), PromptTask("boolq", 5)),
    prompt_start_id=VOCAB,
    ia3_num_tasks=2,
    adapter_size=16,
)
SIZES = {"vocab_size": VOCAB, "hidden_size": 192, "num_heads": 6, "ffn_size": 600}
HEADS = {"head_size": 32, "parts": PARTS}


def calm(tensors: dict[str, Any]) -> dict[str, Any]:
    """Small linear layers, as a trained model's are, so that two right answers compare."""
    tables = ("wte", "wpe", "shared", "lm_head", "embed", "relative", "prompt", "ia3")
    return {
        name: values * np.float32(0.15)
        if values.ndim == 2 and not any(table in name for table in tables)
        else values
        for name, values in tensors.items()
    }


def gpt() -> tuple[Any, dict[str, Any]]:
    config = small_config(**SIZES, **HEADS, num_kv_heads=6, max_positions=200)
    return config, random_tensors(config)


def lora() -> tuple[Any, dict[str, Any]]:
    config = small_config(
        **SIZES,
        head_size=32,
        num_kv_heads=2,
        max_positions=200,
        position_embedding="rope",
        gated=True,
        parts=Adapters(lora_names=("sql", "law"), lora_rank=4, lora_targets=tuple(LORA_TARGETS)),
    )
    return config, random_tensors(config)


def t5() -> tuple[Any, dict[str, Any]]:
    config = t5_config(**{**NEMO, **SIZES, **HEADS, "attention_scale": 32**-0.5})
    return config, t5_tensors(config)


def agm() -> tuple[Any, dict[str, Any]]:
    config = agm_config(**SIZES, attention_scale=32**-0.5)
    return config, agm_tensors(config)


def bart(**changes: Any) -> tuple[Any, dict[str, Any]]:
    config = bart_config(
        **SIZES, num_decoder_heads=6, decoder_ffn_size=600, max_positions=200, **changes
    )
    return config, random_tensors(config)


MODELS = {
    "gpt": gpt,
    "lora": lora,
    "t5": t5,
    "agm": agm,
    "bart": bart,
    "mbart": lambda: bart(norm_placement="pre"),
    "m2m_100": lambda: bart(norm_placement="pre", embedding_norm=False, logits_bias=False),
    "marian": lambda: bart(embedding_norm=False, activation="silu"),
}


def rows(name: str) -> list[GenerateRequest]:
    plain = [GenerateRequest(TEXT[:n], OUTPUT_LEN) for n in (5, 23, 9)]
    if name == "lora":
        return [
            *(replace(row, lora_adapter=number) for number, row in enumerate(plain[:2])),
            plain[2],
            replace(plain[1], lora_adapter=0),
        ]
    if name not in ("gpt", "t5"):
        return plain
    virtual = tuple(VOCAB + n for n in range(3))
    prompted = replace(plain[0], input_ids=(*virtual, *TEXT[:5]), prompt_task=0)
    return [
        *plain,
        prompted,
        replace(prompted, prompt_task=1, ia3_task=1),
        replace(plain[1], ia3_task=0),
    ]


def tokens(engine: Engine, requests: list[GenerateRequest]) -> list[tuple[int, ...]]:
    futures = [engine.submit(request) for request in requests]
    wait(futures)
    return [future.result().output_ids for future in futures]


@pytest.mark.parametrize("quantization", [None, "int8", "fp8"])
@pytest.mark.parametrize("name", MODELS)
def test_float32_tokens_equal_the_cpu_alone_and_together(
    name: str, quantization: Quantization | None
) -> None:
    config, whole = MODELS[name]()
    tensors, requests = calm(whole), rows(name)
    reference = engine_for(config, tensors, quantization=quantization)
    expected = [tokens(reference, [request])[0] for request in requests]
    reference.close()
    engine = engine_for(config, tensors, device="cuda", quantization=quantization)
    try:
        assert [tokens(engine, [request])[0] for request in requests] == expected
        for _ in range(3):  # a shape's first step runs eagerly, its second is recorded
            assert tokens(engine, requests) == expected
    finally:
        engine.close()
