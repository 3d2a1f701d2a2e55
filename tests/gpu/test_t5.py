"""T5 on CUDA against T5 on the CPU: same float32 tokens, whatever runs beside."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import wait
from typing import Any

import numpy as np
import pytest
import torch

from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.engine.distributed.heartbeat import RankProgress
from launcher_scripts.engine.messages.plan import Plan
from launcher_scripts.engine.runner.graphs import GraphCache
from tests.engine.small_models import ALONE, engine_for, generate, load_engine, runner_for
from tests.engine.small_t5 import (
    VARIANTS,
    as_encoder,
    decoder_logits,
    encode,
    t5_config,
    t5_tensors,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

SOURCES = [tuple((7 * i + j * j) % 61 for j in range(3 + 40 * i)) for i in range(8)]
LENGTHS = [30, 3, 17, 24, 9, 30, 1, 12]


@pytest.fixture
def two_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")


def wider(**changes):
    """Large enough for every tile of the kernels to be in use."""
    sizes = {
        "hidden_size": 192,
        "num_heads": 6,
        "head_size": 32,
        "ffn_size": 600,
        "vocab_size": 515,
        "num_buckets": 32,
        "max_distance": 128,
    }
    return t5_config(**{**sizes, **changes, "max_positions": 400})


def calm_tensors(config):
    """Random tensors whose linear layers are small, as a trained model's are.

    With larger ones the softmaxes are nearly hard, and a change of one unit in a weight's last
    place moves the logits by percents: two right answers would not compare.
    """
    tables = ("shared", "lm_head", "embed", "relative")
    return {
        name: values * np.float32(0.15)
        if values.ndim == 2 and not any(table in name for table in tables)
        else values
        for name, values in t5_tensors(config).items()
    }


@pytest.mark.parametrize("name", VARIANTS)
def test_float32_tokens_equal_the_cpu_alone_and_together(name):
    config = wider(**VARIANTS[name])
    tensors = calm_tensors(config)
    pairs = list(zip(SOURCES, LENGTHS, strict=True))
    reference = engine_for(config, tensors)
    expected = [generate(reference, source, length) for source, length in pairs]
    logits = decoder_logits(reference, SOURCES[5], SOURCES[1])
    reference.close()
    engine = engine_for(config, tensors, device="cuda")
    assert [generate(engine, source, length) for source, length in pairs] == expected
    for _ in range(3):  # a shape's first step runs eagerly, its second is recorded
        futures = [engine.submit(GenerateRequest(source, length)) for source, length in pairs]
        wait(futures)
        assert [list(future.result().output_ids) for future in futures] == expected
    got = decoder_logits(engine, SOURCES[5], SOURCES[1])
    assert (got - logits).abs().max() <= 1e-4 * logits.abs().max()
    engine.close()


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("custom", [False, True])
def test_two_gpus_equal_the_cpu_alone_and_together(tmp_path, capsys, custom):
    config = wider(**VARIANTS["gated"])
    tensors = calm_tensors(config)
    pairs = list(zip(SOURCES, LENGTHS, strict=True))
    reference = engine_for(config, tensors)
    expected = [generate(reference, source, length) for source, length in pairs]
    states = encode(reference, SOURCES[4]).hidden_state
    reference.close()
    engine = load_engine(
        tmp_path, config, tensors, 2, 1, device="cuda", enable_custom_all_reduce=custom
    )
    assert "general path" not in capsys.readouterr().out
    for _ in range(3):
        assert [generate(engine, source, length) for source, length in pairs] == expected
        futures = [engine.submit(GenerateRequest(source, length)) for source, length in pairs]
        assert [list(future.result(60).output_ids) for future in futures] == expected
        assert (encode(engine, SOURCES[4]).hidden_state - states).abs().max() <= 1e-3
    engine.close()


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("data_type", ["bf16", "fp16"])
def test_low_precision_on_two_gpus_is_near(tmp_path, data_type):
    """Also where ranks add more rows up than a step of several rows has, in that type."""
    config = wider(**VARIANTS["gated"])
    tensors = calm_tensors(config)
    reference = engine_for(config, tensors)
    engine = load_engine(tmp_path, config, tensors, 2, 1, device="cuda", data_type=data_type)
    for source in (SOURCES[1], SOURCES[3]):
        want = decoder_logits(reference, source, SOURCES[1])
        error = (decoder_logits(engine, source, SOURCES[1]) - want).norm() / want.norm()
        assert error < 0.05
    reference.close()
    engine.close()


def test_sampling_equals_the_cpu_row_by_row():
    config = wider()
    tensors = calm_tensors(config)
    parameters = [
        SamplingParameters(top_k=40, random_seed=1, temperature=0.8),
        SamplingParameters(top_p=0.9, random_seed=2, top_p_decay=0.9, top_p_min=0.2),
        SamplingParameters(repetition_penalty=1.3),
        SamplingParameters(),
        SamplingParameters(presence_penalty=0.7, min_length=8, top_k=5, top_p=0.5, random_seed=9),
    ]
    requests = [
        GenerateRequest(source, 20, sampling=sampling, bad_words=((4,),), return_log_probs=True)
        for source, sampling in zip(SOURCES, parameters, strict=False)
    ]
    answers = []
    for device in ("cpu", "cuda"):
        engine = engine_for(config, tensors, device=device)
        answers.append([future.result() for future in [engine.submit(r) for r in requests]])
        engine.close()
    for reference, got in zip(*answers, strict=True):
        assert got.output_ids == reference.output_ids
        assert got.cum_log_probs == pytest.approx(reference.cum_log_probs, abs=1e-3)


@pytest.mark.parametrize("data_type", ["bf16", "fp16"])
def test_low_precision_is_near(data_type):
    config = wider(**VARIANTS["gated"])
    tensors = calm_tensors(config)
    reference = engine_for(config, tensors)
    engine = engine_for(config, tensors, device="cuda", data_type=data_type)
    want = decoder_logits(reference, SOURCES[3], SOURCES[1])
    error = (decoder_logits(engine, SOURCES[3], SOURCES[1]) - want).norm() / want.norm()
    assert error < 0.05
    assert len(generate(engine, SOURCES[3], 12)) == 12
    reference.close()
    engine.close()


def test_states_of_the_encoder_equal_the_cpu():
    config = as_encoder(wider(**VARIANTS["nemo"]))
    tensors = calm_tensors(config)
    answers = []
    for device in ("cpu", "cuda"):
        engine = engine_for(config, tensors, device=device)
        answers.append(encode(engine, SOURCES[4], attentions=True))
        engine.close()
    reference, got = answers
    assert (got.hidden_state - reference.hidden_state).abs().max() <= 1e-3
    assert (got.attentions - reference.attentions).abs().max() <= 1e-3


class WatchedGraphs(GraphCache):
    """Graphs that keep the keys of what was run."""

    def __init__(self, progress: RankProgress) -> None:
        super().__init__(progress)
        self.keys: list[Hashable] = []

    def run(
        self, key: Hashable, slots: torch.Tensor, function: Callable[[torch.Tensor], Any]
    ) -> Any:
        self.keys.append(key)
        return super().run(key, slots, function)


@torch.inference_mode()
def test_single_inputs_find_their_passes_recorded():
    config, graphs = wider(), WatchedGraphs(ALONE.progress)
    _, runner = runner_for(
        config, calm_tensors(config), device="cuda", max_tokens=2000, graphs=graphs
    )
    step, scratch = runner.decoder.encode_step, runner.decoder.cache.scratch
    shapes = tuple(shape for shape in runner.shapes_to_record() if shape.prompt)
    runner.execute(Plan(record=shapes))
    recorded = set(graphs.keys)
    assert len(recorded) == len(shapes) > 8
    for source in SOURCES:
        plain = step.run([(source, 5)], scratch, runner.device, None)
        keys = runner.decoder.cache.layers[0].keys.clone()
        got = step.run([(source, 5)], scratch, runner.device, graphs)
        assert (got - plain).abs().max() <= 1e-4
        again = runner.decoder.cache.layers[0].keys
        assert (again - keys)[:, 5 : 5 + len(source)].abs().max() <= 1e-4
    assert set(graphs.keys) == recorded
    runner.close()
