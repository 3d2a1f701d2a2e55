"""T5 in the engine: the encoder, the decoder, and what requests may ask of them."""

from __future__ import annotations

import math
import random
from concurrent.futures import wait

import pytest
import torch

from launcher_scripts.common.errors import CheckpointError, RequestError
from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.engine.model.rotary import distance_buckets, relative_bias
from tests.checkpoint import reference_forward_t5
from tests.engine.small_models import engine_for, generate, run
from tests.engine.small_t5 import (
    DECODER,
    SOURCE,
    VARIANTS,
    Plain,
    as_encoder,
    decoder_logits,
    encode,
    t5_config,
    t5_tensors,
)

CONFIG = t5_config()
TENSORS = t5_tensors(CONFIG)


@pytest.fixture(scope="module")
def engine():
    loaded = engine_for(CONFIG, TENSORS, max_batch_size=4)
    yield loaded
    loaded.close()


def sources(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    draw = random.Random(seed)
    return [tuple(draw.randrange(67) for _ in range(draw.randrange(1, 30))) for _ in range(count)]


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_greedy_tokens_are_the_plain_ones(name):
    config = t5_config(**VARIANTS[name])
    tensors = t5_tensors(config)
    plain, loaded = Plain(config, tensors), engine_for(config, tensors)
    want, got = plain.logits(SOURCE, DECODER), decoder_logits(loaded, SOURCE, DECODER)
    assert got.dtype == torch.float32
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    for source in (SOURCE, SOURCE[:1]):
        assert generate(loaded, source, 20) == plain.greedy(source, 20)
    loaded.close()


def test_variants_differ():
    """Every hyperparameter reaches the computation."""
    outputs = {}
    changes = {
        **VARIANTS,
        "plain": {},
        "distance": {"max_distance": 9},
        "eps": {"norm_eps": 0.1},
        "scale": {"attention_scale": 0.5},
        "no layer scaling": {**VARIANTS["cross_bias"], "relative_bias_layer_scaling": False},
    }
    for name, values in changes.items():
        config = t5_config(**values)
        loaded = engine_for(config, t5_tensors(config))
        outputs[name] = decoder_logits(loaded, SOURCE, DECODER)
        loaded.close()
    names = list(outputs)
    for index, name in enumerate(names):
        for other in names[index + 1 :]:
            assert not torch.allclose(outputs[name], outputs[other], atol=1e-5), (name, other)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("buckets", "most"), [(32, 128), (8, 16), (32, 20)])
def test_a_bias_by_distance_is_the_bucketed_one(buckets, most, bidirectional):
    table = torch.randn(3, buckets)
    bias = relative_bias(table, most, bidirectional=bidirectional)
    distances = torch.arange(-700, 701)
    want = table[:, reference_forward_t5.bucket(distances, buckets, most, bidirectional)]
    places = distances.clamp(-bias.reach, bias.reach) + bias.reach
    assert torch.equal(bias.table[:, places], want)
    used = distance_buckets(distances, buckets, most, bidirectional=bidirectional)
    assert 0 <= used.min() < used.max() == buckets - 1


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"num_buckets": 32, "max_distance": 16}, "max_distance must be more than 16"),
        ({"num_buckets": 3}, "num_buckets must be at least 4"),
        (
            {"num_buckets": 32, "max_distance": 8, "encoder_only": True, "num_decoder_layers": 0},
            "max_distance must be more than 8",
        ),
    ],
)
def test_buckets_that_cannot_be(values, reason):
    with pytest.raises(CheckpointError, match=reason):
        t5_config(**values)


def test_neighbours_do_not_change_results(engine):
    requests = [
        GenerateRequest(
            source,
            3 + 2 * index,
            SamplingParameters(top_k=8 * (index % 3), random_seed=index, temperature=1.5),
            decoder_input_ids=DECODER[: index % 4],
        )
        for index, source in enumerate(sources(12))
    ]
    alone = [engine.submit(request).result(60).output_ids for request in requests]
    order = list(range(12))
    random.Random(1).shuffle(order)
    together = {index: engine.submit(requests[index]) for index in order}
    wait(together.values(), 60)
    assert [together[index].result().output_ids for index in range(12)] == alone
    assert len(set(alone)) == 12


def test_what_finds_no_room_waits():
    """Blocks hold source and output; a full cache delays rows and loses none."""
    loaded = engine_for(CONFIG, TENSORS, max_tokens=80)
    requests = [GenerateRequest(source, 20) for source in sources(10, seed=2)]
    futures = [loaded.submit(request) for request in requests]
    plain = Plain(CONFIG, TENSORS)
    for request, future in zip(requests, futures, strict=True):
        assert list(future.result(60).output_ids) == plain.greedy(request.input_ids, 20)
    cancelled = [loaded.submit(GenerateRequest(SOURCE, 50)) for _ in range(6)]
    assert sum(future.cancel() for future in cancelled) > 0
    assert generate(loaded, SOURCE, 5) == plain.greedy(SOURCE, 5)
    loaded.close()


def test_forced_decoder_ids_come_before_what_is_generated(engine):
    plain = Plain(CONFIG, TENSORS)
    answer = run(engine, SOURCE, 6, decoder_input_ids=DECODER, return_context_logits=True)
    assert answer.context_logits.shape == (len(DECODER), CONFIG.vocab_size)
    logits = plain.logits(SOURCE, (*DECODER, *answer.output_ids))
    assert list(answer.output_ids) == logits[len(DECODER) - 1 : -1].argmax(-1).tolist()
    first = run(engine, SOURCE, 1, return_context_logits=True)
    assert torch.allclose(first.context_logits, plain.logits(SOURCE, (0,)), atol=1e-5)
    other = run(engine, SOURCE, 1, start_id=7, return_context_logits=True)
    assert torch.allclose(other.context_logits, plain.logits(SOURCE, (7,)), atol=1e-5)


def test_sampling_looks_at_the_decoder_alone(engine):
    """Penalties and words count the decoder's tokens, its start included, not the source's."""
    logits = Plain(CONFIG, TENSORS).logits(SOURCE, DECODER)[-1]
    penalized = logits.clone()
    seen = torch.tensor(DECODER)
    penalized[seen] -= 1000.0
    sampling = SamplingParameters(presence_penalty=1000.0)
    answer = run(engine, SOURCE, 1, decoder_input_ids=DECODER, sampling=sampling,
                 return_log_probs=True)  # fmt: skip
    assert answer.output_ids == (int(penalized.argmax()),)
    assert answer.cum_log_probs == pytest.approx(float(penalized.log_softmax(-1).max()), abs=1e-4)
    best = int(logits.argmax())
    banned = run(engine, SOURCE, 1, decoder_input_ids=DECODER, bad_words=((DECODER[-1], best),))
    logits[best] = -math.inf
    assert banned.output_ids == (int(logits.argmax()),)


def test_rows_end_with_end_id_stop_words_and_length(engine):
    tokens = generate(engine, SOURCE, 12)
    assert len(tokens) == 12
    first = tokens.index(tokens[-1])
    assert generate(engine, SOURCE, 12, end_id=tokens[-1]) == tokens[: first + 1]
    word = tuple(tokens[2:4])
    ended = generate(engine, SOURCE, 12, stop_words=(word,))
    assert tuple(ended[-2:]) == word
    assert ended == tokens[: len(ended)]
    longer = SamplingParameters(min_length=3)
    assert len(generate(engine, SOURCE, 12, end_id=tokens[0], sampling=longer)) >= 3


def test_hidden_states_and_attentions():
    config = as_encoder(CONFIG)
    loaded = engine_for(config, TENSORS)
    plain = Plain(CONFIG, TENSORS)
    futures = {
        source: loaded.submit(
            GenerateRequest(source, 0, return_hidden_state=True, return_attentions=bool(index % 2))
        )
        for index, source in enumerate(sources(9, seed=4))
    }
    for index, (source, future) in enumerate(futures.items()):
        answer = future.result(60)
        assert answer.output_ids == ()
        assert torch.allclose(answer.hidden_state, plain.hidden(source), atol=1e-5)
        assert (answer.attentions is not None) == bool(index % 2)
    loaded.close()


def test_attentions_weigh_the_values():
    """One layer whose values and output are the identity: states follow from the attentions."""
    config = as_encoder(t5_config(num_layers=1, num_heads=1, head_size=24, num_decoder_layers=1))
    tensors = t5_tensors(config)
    identity = torch.eye(24).numpy()
    for part in "vo":
        tensors[f"encoder.block.0.layer.0.SelfAttention.{part}.weight"] = identity
    tensors["encoder.block.0.layer.1.DenseReluDense.wo.weight"] *= 0
    loaded = engine_for(config, tensors)
    answer = encode(loaded, SOURCE, attentions=True)
    loaded.close()
    assert answer.attentions.shape == (1, 1, len(SOURCE), len(SOURCE))
    x = torch.from_numpy(tensors["shared.weight_T"])[list(SOURCE)]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.norm_eps)
        return x * scale * torch.from_numpy(tensors[f"encoder.{name}.weight"])

    state = x + answer.attentions[0, 0] @ norm(x, "block.0.layer.0.layer_norm")
    assert torch.allclose(answer.hidden_state, norm(state, "final_layer_norm"), atol=1e-5)


LEARNED = t5_config(**VARIANTS["learned"])


@pytest.mark.parametrize(
    ("config", "request_", "message"),
    [
        (CONFIG, GenerateRequest((), 3), "input_ids is empty"),
        (CONFIG, GenerateRequest((1, 67), 3), r"input_ids has ids outside .*got \[67\]"),
        (CONFIG, GenerateRequest((1,), 3, decoder_input_ids=(0, 99)), "decoder_input_ids has ids"),
        (CONFIG, GenerateRequest((1,), 3, start_id=80), "start_id is an id outside"),
        (CONFIG, GenerateRequest((1,), -1), "max_output_len is negative"),
        (CONFIG, GenerateRequest((1,), 1 << 31), "which holds"),
        (CONFIG, GenerateRequest((1,) * 9000, 1), "the input's 9000 tokens"),
        (LEARNED, GenerateRequest((1,) * 41, 1), "the encoder has 40 positions"),
        (LEARNED, GenerateRequest((1,), 41), "need 41 positions, and the model has 40"),
        (as_encoder(CONFIG), GenerateRequest((1,), 2), "an encoder alone generates nothing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_request_is_answered(config, request_, message):
    loaded = engine_for(config, t5_tensors(config))
    with pytest.raises(RequestError, match=message):
        loaded.submit(request_).result(60)
    loaded.warm_up()
    loaded.close()


def test_a_source_longer_than_a_step_takes_is_read_at_once(monkeypatch):
    monkeypatch.setattr("launcher_scripts.engine.engine.PREFILL_TOKENS", {"cpu": 4})
    loaded = engine_for(CONFIG, TENSORS)
    plain = Plain(CONFIG, TENSORS)
    rows = [SOURCE, SOURCE[:2], SOURCE[:3], (*SOURCE, *SOURCE)]
    futures = [loaded.submit(GenerateRequest(source, 6)) for source in rows]
    for source, future in zip(rows, futures, strict=True):
        assert list(future.result(60).output_ids) == plain.greedy(source, 6)
    assert torch.allclose(
        decoder_logits(loaded, SOURCE, DECODER), plain.logits(SOURCE, DECODER), atol=1e-4
    )
    loaded.close()


@pytest.mark.parametrize("data_type", ["fp16", "bf16"])
def test_low_precision_is_near(data_type):
    loaded = engine_for(CONFIG, TENSORS, data_type=data_type)
    want = Plain(CONFIG, TENSORS).logits(SOURCE, DECODER)
    error = (decoder_logits(loaded, SOURCE, DECODER) - want).norm() / want.norm()
    assert error < (0.01 if data_type == "fp16" else 0.05)
    loaded.close()
