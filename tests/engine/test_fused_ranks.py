"""Inputs and prompts on the fused way, on several tensor-parallel ranks and on one."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.messages.plan import PrefillPart, RowStart
from launcher_scripts.engine.model.layers import Sublayer
from launcher_scripts.models.adapters import Adapters
from tests.engine.small_models import (
    EagerGraphs,
    lora_targets,
    random_tensors,
    runner_for,
    small_config,
)
from tests.engine.small_t5 import GATED, SOURCE, VARIANTS, t5_config, t5_tensors
from tests.engine.thread_ranks import on_ranks

ROWS = [(SOURCE, 0), ((9,), 20), ((4, 1, 8), 30)]
PROMPTS = [(5, 60, 11, 11, 2, 33, 47, 0, 9, 28), (7,), (1, 2, 3)]
# Rotary positions and windows, and two heads of keys and values for four of queries.
GROUPED = {
    **GATED,
    "position_embedding": "rope",
    "rotary_base": 50.0,
    "num_kv_heads": 2,
    "sliding_window": 3,
    "full_attention_layers": "1",
}
T5 = {**VARIANTS, "grouped": GROUPED}
CASES = [*((name, tp) for name in VARIANTS for tp in (2, 4)), ("grouped", 2)]
MODERN = {
    "position_embedding": "rope",
    "normalization": "rmsnorm",
    "activation": "silu",
    "gated": True,
    "num_kv_heads": 2,
}
LORA = Adapters(
    lora_names=("sql", "law"), lora_rank=3, lora_targets=lora_targets(small_config(**MODERN))
)
GPT = {
    "gpt2": {},
    "modern": MODERN,
    "parallel": {**MODERN, "parallel_residual": True},
    "sandwich": {**MODERN, "norm_placement": "sandwich"},
    "lora": {**MODERN, "parts": LORA},
    "lora_sandwich": {**MODERN, "norm_placement": "sandwich", "parts": LORA},
}


@pytest.fixture(autouse=True)
def no_general_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Sublayer, "forward")


def encoded(communicator: Communicator, name: str) -> tuple[Tensor, Tensor, list[object], int]:
    """States, the keys and values that the decoder reads [layers, heads, tokens, 2 * size], what is
    recorded as which graph, and up to how many tokens."""
    config = t5_config(**T5[name])
    graphs = EagerGraphs()
    _, runner = runner_for(config, t5_tensors(config), graphs=graphs, communicator=communicator)
    step, cache = runner.decoder.encode_step, runner.decoder.cache
    states = step.run(ROWS, cache.scratch, runner.device, graphs)
    step.record(32, cache.scratch, runner.device, graphs)
    slots = [start + at for ids, start in ROWS for at in range(len(ids))]
    layers = [torch.cat((layer.keys, layer.values), -1) for layer in cache.layers.values()]
    read = torch.stack([layer[:, slots] for layer in layers])
    return states, read, graphs.asked + graphs.recorded, step.longest_recorded


@pytest.mark.parametrize(("name", "tp"), CASES)
@torch.inference_mode()
def test_an_encoder_says_what_it_says_on_one_rank(name: str, tp: int) -> None:
    want, all_read, asked, _ = encoded(Communicator(), name)
    ranks = on_ranks(tp, partial(encoded, name=name))
    for states, *_ in ranks:
        assert (states - want).abs().max() <= 2e-5 * want.abs().max()
    read = torch.cat([read for _, read, *_ in ranks], 1)
    assert (read - all_read).abs().max() <= 2e-5 * all_read.abs().max()
    assert all(recorded == asked for *_, recorded, _ in ranks)
    assert len({longest for *_, longest in ranks}) == 1


def prompt_logits(communicator: Communicator, name: str) -> tuple[Tensor, list[object]]:
    """Logits behind every token of all prompts, and the graphs they ran as."""
    config = small_config(**GPT[name])
    graphs = EagerGraphs()
    _, runner = runner_for(config, random_tensors(config), graphs=graphs, communicator=communicator)
    adapters = (1, None, 0) if config.parts.lora_names else (None, None, None)
    rows = [
        RowStart(slot, 20 * slot, ids, -1, GenerateRequest((), 0, lora_adapter=adapters[slot]))
        for slot, ids in enumerate(PROMPTS)
    ]
    parts = [PrefillPart(row.slot, 0, len(row.ids)) for row in rows]
    ids = [torch.tensor(prompt) for prompt in PROMPTS]
    logits = runner._prefill.logits(rows, parts, torch.cat(ids))
    alone = runner._prefill.logits(rows[1:2], parts[1:2], ids[1])
    return torch.cat([logits, alone]), graphs.asked


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", GPT)
@torch.inference_mode()
def test_prompts_say_what_they_say_on_one_rank(name: str, tp: int) -> None:
    want, asked = prompt_logits(Communicator(), name)
    for logits, recorded in on_ranks(tp, partial(prompt_logits, name=name)):
        assert (logits - want).abs().max() <= 2e-5 * want.abs().max()
        assert recorded == asked
