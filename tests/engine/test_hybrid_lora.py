"""LoRA of the projections of hybrids' branches: merged into them, beside them for requests to
choose, and added to a running engine, the logits are those of transformers' model with merged
weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from launcher_scripts.contract.requests import GenerateRequest
from tests.checkpoint.engine_answers import answers
from tests.checkpoint.exporting import export_folder
from tests.checkpoint.peft_maker import PeftMaker
from tests.engine.test_added_lora import running
from tests.engine.test_family_switches import drawn
from tests.engine.test_family_switches import made as made_of
from tests.engine.test_hybrids import NO_END, check, made, text

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
# A family of tests/engine/test_hybrids.py -> the ends of the modules' names.
MODULES = {
    "nemotron_h": (*ATTENTION, "in_proj", "out_proj", "up_proj", "down_proj"),
    "nemotron_h latent": (*ATTENTION, "in_proj", "out_proj"),
    "bamba": (*ATTENTION, "in_proj", "out_proj", "gate_proj", "down_proj"),
    "falcon_h1": (*ATTENTION, "in_proj", "out_proj", "gate_proj", "up_proj", "down_proj"),
    "granitemoehybrid": (*ATTENTION, "in_proj", "out_proj"),
    "qwen3_next": (*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"),
    "qwen3_5_text": (
        *ATTENTION,
        *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
        *("up_proj", "down_proj"),
    ),
    "kimi_linear": (
        *(*ATTENTION, "b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"),
        *("kv_a_proj_with_mqa", "kv_b_proj"),
    ),
    "lfm2": ("q_proj", "k_proj", "in_proj", "out_proj", "w1", "w2"),
    "gemma4_text": ("q_proj", "k_proj"),  # the projection of keys makes values, too
}


@pytest.mark.parametrize("tp_size", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODULES)
def test_adapters_add_to_every_kind_of_branch(name: str, tp_size: int, tmp_path: Path) -> None:
    if name == "gemma4_text":
        model = made_of(name, {**drawn(name, 3), "attention_k_eq_v": True})
    else:
        model = made(name)
    model.save_pretrained(tmp_path / "base")
    maker = PeftMaker(model)
    modules = [module for module in maker.modules(*MODULES[name]) if "experts" not in module]
    for module in modules:
        maker.lora(module, 0.4, 3)
    adapter = maker.write(
        tmp_path / "sql", r=3, lora_alpha=1.2, target_modules=[m[6:] for m in modules]
    )
    prompt = text(50)
    plain, kept = (
        GenerateRequest(prompt, 8, end_id=NO_END, return_context_logits=True, lora_adapter=number)
        for number in (None, 0)
    )
    folder = export_folder(
        tmp_path / "base", tmp_path / "kept", tp_size, lora_checkpoints=(adapter,)
    )
    with running(folder, tp_size) as engine:
        added = replace(kept, lora_adapter=engine.loras.load("law", Path(adapter)))
        without, beside, later = (engine.submit(row).result(120) for row in (plain, kept, added))
    with torch.no_grad():
        expected = model(torch.tensor([prompt]), use_cache=False).logits[0].numpy()
    close(without.context_logits, expected)
    model.load_state_dict(maker.merged)
    with torch.no_grad():
        expected = model(torch.tensor([prompt]), use_cache=False).logits[0].numpy()
    close(beside.context_logits, expected)
    close(later.context_logits, expected)
    assert later.output_ids == beside.output_ids
    check(model, prompt, beside.output_ids)
    folder = export_folder(
        tmp_path / "base", tmp_path / "merged", tp_size, adapter_checkpoints=(adapter,)
    )
    (merged,) = answers(folder, plain, tp_size=tp_size)
    close(merged.context_logits, expected)


def close(found: object, expected: np.ndarray) -> None:
    size = float(np.abs(expected).max())
    np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=2e-4 * size)
