"""The engine on CUDA against the engine on the CPU: same float32 tokens, whatever runs beside."""

from __future__ import annotations

from concurrent.futures import wait

import pytest
import torch

from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.engine.engine import Engine
from tests.engine.small_models import (
    context_logits,
    engine_for,
    generate,
    load_engine,
    random_tensors,
    small_config,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

PROMPTS = [tuple((7 * i + j * j) % 61 for j in range(3 + 5 * i)) for i in range(8)]
LENGTHS = [30, 3, 17, 24, 9, 30, 1, 12]
MODERN = {
    "position_embedding": "rope",
    "normalization": "rmsnorm",
    "activation": "silu",
    "gated": True,
    "attention_bias": False,
    "mlp_bias": False,
    "tied_embeddings": False,
    "num_kv_heads": 2,
}
VARIANTS = [
    {},
    MODERN,
    {"position_embedding": "rope", "rotary_percentage": 0.5, "activation": "gelu_erf"},
    {"position_embedding": "alibi", "embedding_norm": True, "num_kv_heads": 1},
    {"norm_placement": "post", "activation": "squared_relu"},
    {**MODERN, "qk_norm": True},
    {**MODERN, "qk_norm": True, "joint_qk_norm": True, "norm_placement": "branch"},
    {
        **MODERN,
        "norm_placement": "sandwich",
        "embedding_scale": 2.0,
        "attention_softcap": 5.0,
        "logits_softcap": 9.0,
        "sliding_window": 20,
        "full_attention_layers": "1",
        "rotary_local_base": 100.0,
    },
    {"position_embedding": "rope", "parallel_residual": True, "logits_bias": True},
    {
        **MODERN,
        "num_experts": 7,
        "experts_per_token": 2,
        "shared_expert_size": 64,
        "dense_layers": "0",
        "dense_ffn_size": 600,
    },
    {
        **MODERN,
        "sliding_window": 20,
        "full_attention_layers": "1",
        "unrotated_layers": "1",
    },
    {**MODERN, "head_size": 160, "num_heads": 2, "num_kv_heads": 1},
]


def wider(**changes):
    """Large enough for every tile of the kernels to be in use."""
    sizes = {
        "hidden_size": 192,
        "num_heads": 6,
        "head_size": 32,
        "ffn_size": 600,
        "max_positions": 1200,
        "vocab_size": 515,
        "end_id": 2,
    }
    changes = dict(changes)
    changes.setdefault("num_kv_heads", 6)
    return small_config(**{**sizes, **changes})


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_float32_tokens_equal_the_cpu_alone_and_together(changes):
    config = wider(**changes)
    tensors = random_tensors(config)
    reference = engine_for(config, tensors)
    expected = [
        generate(reference, prompt, length) for prompt, length in zip(PROMPTS, LENGTHS, strict=True)
    ]
    logits = context_logits(reference, PROMPTS[5])
    reference.close()
    engine = engine_for(config, tensors, device="cuda")
    alone = [
        generate(engine, prompt, length) for prompt, length in zip(PROMPTS, LENGTHS, strict=True)
    ]
    assert alone == expected
    for _ in range(3):  # a shape's first step runs eagerly, its second is recorded
        futures = [
            engine.submit(GenerateRequest(prompt, length))
            for prompt, length in zip(PROMPTS, LENGTHS, strict=True)
        ]
        wait(futures)
        assert [list(future.result().output_ids) for future in futures] == expected
    assert (context_logits(engine, PROMPTS[5]) - logits).abs().max() <= 1e-3
    engine.close()


def test_long_contexts_cross_the_splits():
    config = wider(end_id=515, **MODERN)
    tensors = random_tensors(config)
    prompt = tuple((j * j + 3) % 509 for j in range(1000))
    reference, engine = (engine_for(config, tensors, device=device) for device in ("cpu", "cuda"))
    assert generate(engine, prompt, 100) == generate(reference, prompt, 100)
    short = PROMPTS[1]
    assert generate(engine, short, 400) == generate(reference, short, 400)
    reference.close()
    engine.close()


@pytest.mark.parametrize("words", [(), ((4,), (9, 8))])
@pytest.mark.parametrize("rows", [slice(2), slice(2, None)])
def test_sampling_equals_the_cpu_row_by_row(rows, words):
    """With and without processing of logits, on the graphs of a second round too."""
    config = wider()
    tensors = random_tensors(config)
    parameters = [
        SamplingParameters(top_k=40, random_seed=1, temperature=0.8),
        SamplingParameters(top_p=0.9, random_seed=2, top_p_decay=0.9, top_p_min=0.2),
        SamplingParameters(repetition_penalty=1.3),
        SamplingParameters(),
        SamplingParameters(presence_penalty=0.7, min_length=8, top_k=5, top_p=0.5, random_seed=9),
        SamplingParameters(no_repeat_ngram_size=2, top_k=3, random_seed=5),
    ]
    requests = [
        GenerateRequest(prompt, 20, sampling=sampling, bad_words=words, return_log_probs=True)
        for prompt, sampling in zip(PROMPTS, parameters[rows], strict=False)
    ]
    reference, engine = (engine_for(config, tensors, device=device) for device in ("cpu", "cuda"))
    expected = [future.result() for future in [reference.submit(each) for each in requests]]
    for _ in range(3):
        answers = [future.result() for future in [engine.submit(each) for each in requests]]
        for want, got in zip(expected, answers, strict=True):
            assert got.output_ids == want.output_ids
            assert got.cum_log_probs == pytest.approx(want.cum_log_probs, abs=1e-3)
            assert got.output_log_probs == pytest.approx(want.output_log_probs, abs=1e-3)
    reference.close()
    engine.close()


def test_penalties_biases_and_log_probabilities_equal_the_cpus():
    """Beside rows that ask for nothing, on the graphs of a second round too."""
    config = wider(end_id=515)
    tensors = random_tensors(config)
    parameters = [
        SamplingParameters(frequency_penalty=0.7, output_presence_penalty=-0.4),
        SamplingParameters(top_p=1.0, min_p=0.05, random_seed=3, frequency_penalty=0.5),
        SamplingParameters(top_k=30, min_p=0.1, random_seed=4, temperature=1.4),
        SamplingParameters(),
    ]
    requests = [
        GenerateRequest(
            prompt,
            20,
            sampling,
            logit_bias=((7, 1.5), (300, -3.0)) if index < 3 else (),
            num_log_probs=(5, 0, 20, -1)[index],
            num_prompt_log_probs=(3, -1, 0, -1)[index],
        )
        for index, (prompt, sampling) in enumerate(zip(PROMPTS[2:], parameters, strict=False))
    ]
    reference, engine = (engine_for(config, tensors, device=device) for device in ("cpu", "cuda"))
    expected = [future.result() for future in [reference.submit(each) for each in requests]]
    for _ in range(3):
        answers = [future.result() for future in [engine.submit(each) for each in requests]]
        for want, got in zip(expected, answers, strict=True):
            assert got.output_ids == want.output_ids
            for name in ("token_log_probs", "prompt_log_probs"):
                one, other = getattr(want, name), getattr(got, name)
                assert (one is None) == (other is None)
                if one is not None:
                    assert torch.equal(other.ranks, one.ranks)
                    assert torch.equal(other.top_ids, one.top_ids)
                    assert torch.allclose(other.log_probs, one.log_probs, atol=1e-3)
                    assert torch.allclose(other.top_log_probs, one.top_log_probs, atol=1e-3)
    reference.close()
    engine.close()


@pytest.mark.parametrize(("quantization", "near"), [("int8", 1.0), ("fp8", 0.8)])
@pytest.mark.parametrize("changes", [{}, MODERN], ids=str)
def test_quantized_weights_give_the_tokens_of_the_cpu(changes, quantization, near):
    """near: the share of tokens in half precision that the reference finds likely, too. More than
    64 rows are rounded to fp8 as well, those of the CPU are not."""
    config = wider(**changes)
    tensors = random_tensors(config)
    reference = engine_for(config, tensors, quantization=quantization)
    engine = engine_for(config, tensors, quantization=quantization, device="cuda")
    for prompt, length in zip(PROMPTS, LENGTHS, strict=True):
        assert generate(engine, prompt, length) == generate(reference, prompt, length)
    engine.close()
    half = engine_for(config, tensors, quantization=quantization, device="cuda", data_type="bf16")
    assert likely(half, reference) >= near
    half.close()
    reference.close()


def likely(engine: Engine, reference: Engine) -> float:
    """The share of the engine's tokens that the reference finds likely, too."""
    futures = [engine.submit(GenerateRequest(prompt, 12)) for prompt in PROMPTS]
    found = []
    for prompt, future in zip(PROMPTS, futures, strict=True):
        tokens = list(future.result().output_ids)
        logits = context_logits(reference, (*prompt, *tokens))[len(prompt) - 1 : -1]
        picked = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        found += (logits.max(-1).values - picked < 0.3 * logits.std()).tolist()
    return sum(found) / len(found)


@pytest.mark.parametrize("data_type", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("changes", [{}, *VARIANTS[6:7], *VARIANTS[-1:], MODERN], ids=str)
def test_keys_and_values_in_fp8_give_the_tokens_of_the_cpu(changes, data_type):
    """Numbers that differ in their last bits may be neighbours in e4m3."""
    config = wider(**changes)
    tensors = random_tensors(config)
    reference = engine_for(config, tensors, kv_cache_dtype="fp8")
    engine = engine_for(
        config, tensors, device="cuda", data_type=data_type, kv_cache_dtype="fp8", max_tokens=2000
    )
    assert likely(engine, reference) >= (0.97 if data_type == "fp32" else 0.85)
    want = context_logits(reference, PROMPTS[6])
    error = (context_logits(engine, PROMPTS[6]) - want).norm() / want.norm()
    assert error < {"fp32": 0.02, "fp16": 0.1, "bf16": 0.15}[data_type]
    engine.close()
    reference.close()


@pytest.mark.parametrize("data_type", ["bf16", "fp16"])
def test_low_precision_is_near(data_type):
    config = wider(**MODERN)
    tensors = random_tensors(config)
    reference = engine_for(config, tensors)
    engine = engine_for(config, tensors, device="cuda", data_type=data_type)
    want = context_logits(reference, PROMPTS[6])
    error = (context_logits(engine, PROMPTS[6]) - want).norm() / want.norm()
    assert error < 0.06
    tokens = generate(engine, PROMPTS[3], 12)
    again = context_logits(engine, (*PROMPTS[3], *tokens))
    start = len(PROMPTS[3]) - 1
    picked = again[start:-1].gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (again[start:-1].max(-1).values - picked).max() < 0.15 * again.std()
    reference.close()
    engine.close()


@pytest.mark.parametrize("custom", [False, True])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2), (4, 1)])
def test_several_gpus_equal_the_cpu(tmp_path, capsys, tp, pp, custom):
    if torch.cuda.device_count() < tp * pp:
        pytest.skip(f"needs {tp * pp} GPUs")
    config = wider(**{**MODERN, "num_heads": 12, "head_size": 16, "num_kv_heads": 4})
    tensors = random_tensors(config)
    reference = engine_for(config, tensors)
    expected = [
        generate(reference, prompt, length) for prompt, length in zip(PROMPTS, LENGTHS, strict=True)
    ]
    logits = context_logits(reference, PROMPTS[5])
    reference.close()
    engine = load_engine(
        tmp_path, config, tensors, tp, pp, device="cuda", enable_custom_all_reduce=custom
    )
    assert ("through each other's memory" in capsys.readouterr().out) == (custom and tp > 1)
    for _ in range(3):
        futures = [
            engine.submit(GenerateRequest(prompt, length))
            for prompt, length in zip(PROMPTS, LENGTHS, strict=True)
        ]
        assert [list(future.result(60).output_ids) for future in futures] == expected
    assert (context_logits(engine, PROMPTS[5]) - logits).abs().max() <= 1e-3
    sampling = SamplingParameters(top_k=20, random_seed=3)
    drawn = [generate(engine, PROMPTS[2], 15, sampling=sampling) for _ in range(2)]
    assert drawn[0] == drawn[1]
    engine.close()
