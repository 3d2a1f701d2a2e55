"""Inputs on the fast way through an encoder: together, alone, filled up; the general path."""

from __future__ import annotations

import pytest
import torch

from launcher_scripts.engine.model import encoder
from launcher_scripts.engine.model.encoder import Sources, pack_rows, pass_tokens
from launcher_scripts.engine.model.layers import Chunk
from tests.engine.small_models import engine_for, generate
from tests.engine.small_t5 import (
    GATED,
    SOURCE,
    VARIANTS,
    decoder_logits,
    t5_config,
    t5_tensors,
)

ROUNDING = 5e-5  # other shapes and numbers of threads add up in other orders
ROWS = [((3, 5, 7, 11, 2), 0), ((9,), 20), ((4, 1, 8), 30)]


ROTARY = {
    **GATED,
    "position_embedding": "rope",
    "rotary_base": 50.0,
    "sliding_window": 3,
    "full_attention_layers": "1",
    "embedding_scale": 2.5,
    "logits_softcap": 3.0,
}
CONFIGS = {**{name: VARIANTS[name] for name in ("google", "gated", "per_layer")}, "rotary": ROTARY}


@pytest.fixture(params=CONFIGS)
def runner(request):
    config = t5_config(**CONFIGS[request.param])
    engine = engine_for(config, t5_tensors(config))
    yield engine._loaded
    engine.close()


def states_and_cache(runner, values, tokens):
    for layer in runner.decoder.cache.layers.values():
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.nan)
    states = runner.decoder.encode_step.forward(Sources(torch.tensor(values), tokens))
    pools = [(layer.keys, layer.values) for layer in runner.decoder.cache.layers.values()]
    tokens = runner.decoder.cache.capacity
    return states, torch.stack([torch.stack(pool)[:, :, :tokens] for pool in pools])


@torch.inference_mode()
def test_the_general_path_says_the_same(runner):
    ids = torch.tensor([token for ids, _ in ROWS for token in ids])
    chunks = tuple(Chunk(start + len(ids), 0, 0, len(ids)) for ids, start in ROWS)
    states, cache = states_and_cache(runner, pack_rows(ROWS), len(ids))
    expected = runner.decoder.encode(ids, chunks, attentions=False).hidden
    assert torch.allclose(states, expected, atol=ROUNDING)
    for layer, (keys, values) in zip(runner.decoder.cache.layers.values(), cache, strict=True):
        written = ~keys[0, :, 0].isnan()
        assert written.sum() == len(ids)
        for found, same in ((layer.keys, keys), (layer.values, values)):
            kept = found[:, : len(written)][:, written]
            assert torch.allclose(kept, same[:, written], atol=ROUNDING)


@torch.inference_mode()
def test_padding_changes_nothing(runner):
    plain, cache = states_and_cache(runner, pack_rows(ROWS), 9)
    filled, same_cache = states_and_cache(
        runner, pack_rows(ROWS, runner.decoder.cache.scratch, 16), 16
    )
    assert torch.allclose(filled[:9], plain, atol=ROUNDING)
    assert not filled.isnan().any()
    assert torch.allclose(same_cache, cache, atol=ROUNDING, equal_nan=True)


@torch.inference_mode()
def test_an_input_alone_says_the_same(runner):
    together, _ = states_and_cache(runner, pack_rows(ROWS), 9)
    alone, _ = states_and_cache(runner, pack_rows(ROWS[1:2]), 1)
    assert torch.allclose(alone, together[5:6], atol=ROUNDING)


def test_fused_steps_choose_the_tokens_of_the_general_path():
    """Prompts of a T5 take the general path, and what follows them fused steps."""
    config = t5_config(**ROTARY)
    engine = engine_for(config, t5_tensors(config))
    chosen = generate(engine, SOURCE, 12)
    said = decoder_logits(engine, SOURCE, (config.start_id, *chosen[:-1]))
    engine.close()
    assert said.argmax(-1).tolist() == chosen


def test_what_is_packed():
    assert pack_rows([((7, 8), 5), ((9,), 1)]) == [7, 8, 9, 0, 1, 0, 5, 6, 1, 0, 2, 0, 2, 1, 0]
    filled = pack_rows([((7, 8), 5), ((9,), 1)], 99, 16)
    tokens, blocks = filled[: 3 * 16], filled[3 * 16 :]
    assert tokens[:3] == [7, 8, 9]
    assert tokens[32:] == [5, 6, 1, *[99] * 13]
    assert blocks == [0, 2, 0, 2, 1, 0, 3, 13, 0, 0, 0, 0]


def test_buckets_waste_little():
    assert [pass_tokens(tokens) for tokens in (1, 16, 17, 128)] == [16, 16, 32, 128]
    assert [pass_tokens(tokens) for tokens in (129, 160, 161, 256, 257)] == [
        160,
        160,
        192,
        256,
        320,
    ]
    assert all(0 <= pass_tokens(tokens) - tokens < tokens / 4 for tokens in range(129, 5000))


class Unrecorded:
    """Graphs that run everything at once, and remember under which names."""

    def __init__(self):
        self.keys = []

    def run(self, key, values, function):
        self.keys.append(key)
        return function(values)

    record = run


@torch.inference_mode()
def test_short_passes_are_recorded_by_bucket(runner):
    step, graphs = runner.decoder.encode_step, Unrecorded()
    device, scratch = torch.device("cpu"), runner.decoder.cache.scratch
    expected = step.run(ROWS, scratch, device, None)
    assert torch.allclose(step.run(ROWS, scratch, device, graphs), expected, atol=ROUNDING)
    other = step.run(ROWS[:2], scratch, device, graphs)
    assert torch.allclose(other, expected[:6], atol=ROUNDING)
    assert graphs.keys == [("sources", 16, 3 * 16 + 3 * 4)] * 2
    step.longest_recorded = 15
    step.run(ROWS, scratch, device, graphs)
    assert len(graphs.keys) == 2


@torch.inference_mode()
def test_passes_of_single_inputs_are_recorded_before(runner, monkeypatch):
    monkeypatch.setattr(encoder, "LONGEST_BEFOREHAND", 200)
    step, graphs = runner.decoder.encode_step, Unrecorded()
    device, scratch = torch.device("cpu"), runner.decoder.cache.scratch
    assert step.buckets() == [16, 32, 64, 128, 160, 192]
    for tokens in step.buckets():
        step.record(tokens, scratch, device, graphs)
    recorded = set(graphs.keys)
    for tokens in (1, 16, 17, 33, 64, 65, 66, 128):
        step.run([((3,) * tokens, 0)], scratch, device, graphs)
    assert set(graphs.keys) == recorded
    step.longest_recorded = 150
    assert step.buckets() == [16, 32, 64, 128]
