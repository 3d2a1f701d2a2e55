"""CTranslate2's models of our shapes, with random bfloat16 weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
from ctranslate2.specs import common_spec, model_spec, transformer_spec

from benchmarks.repositories import random_bits
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.models.gpt import GPTConfig
from launcher_scripts.models.t5 import T5Config

# How requests of different lengths can be run together: one batch until its longest row ends, one
# that rows leave, and several at the same time.
STRATEGIES: dict[str, dict[str, Any]] = {
    "one batch": {"leave_early": False, "parts": 1},
    "rows leave": {"leave_early": True, "parts": 1},
    "several batches, rows leave": {"leave_early": True, "parts": 4},
}
VERSION = ctranslate2.__version__
COMPUTE_TYPES = {"cuda": "bfloat16", "cpu": "float32"}


class RandomBits(model_spec.Variable):
    """A bfloat16 tensor whose numbers repeat one block."""

    def __init__(self, shape: Sequence[int], block: np.ndarray) -> None:
        self._shape = list(shape)
        self._block = block

    @property
    def shape(self) -> list[int]:
        return self._shape

    @property
    def dtype(self) -> str:
        return "bfloat16"

    def numpy(self) -> np.ndarray:
        return np.resize(self._block, self._shape)

    def num_bytes(self) -> int:
        return 2 * int(np.prod(self._shape))

    def to_bytes(self) -> bytes:
        return self.numpy().tobytes()

    def _to(self, dtype: str) -> model_spec.Variable:
        raise TypeError(f"a bfloat16 tensor is not turned into {dtype}")

    def _equal(self, other: object) -> bool:
        return self is other


def write(folder: Path, config: GPTConfig | T5Config) -> None:
    """Make CTranslate2's model folder."""
    is_t5 = isinstance(config, T5Config)
    spec = _t5_spec(config) if is_t5 else _gpt_spec(config)
    _fill(spec, _t5_shapes(config) if is_t5 else _gpt_shapes(config))
    tokens = _tokens(range(config.vocab_size))
    if is_t5:
        spec.register_source_vocabulary(tokens)
        spec.register_target_vocabulary(tokens)
        spec.config.decoder_start_token = tokens[config.start_id]
    else:
        spec.register_vocabulary(tokens)
    spec.config.unk_token = spec.config.bos_token = tokens[0]
    spec.config.eos_token = tokens[1]
    spec.validate()
    folder.mkdir(parents=True)
    spec.save(str(folder))


def _gpt_spec(config: GPTConfig) -> model_spec.ModelSpec:
    spec = transformer_spec.TransformerDecoderModelSpec.from_config(
        config.num_layers,
        config.num_heads,
        pre_norm=True,
        activation=common_spec.Activation.GELUTanh,
    )
    spec.decoder.scale_embeddings = False
    return spec


def _gpt_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    hidden, ffn = config.hidden_size, config.ffn_size
    return {
        "position_encodings/encodings": (config.max_positions, hidden),
        "embeddings/weight": (config.vocab_size, hidden),
        "projection/weight": (config.vocab_size, hidden),
        "gamma": (hidden,),
        "beta": (hidden,),
        "self_attention/linear_0/weight": (3 * hidden, hidden),
        "self_attention/linear_0/bias": (3 * hidden,),
        "self_attention/linear_1/weight": (hidden, hidden),
        "self_attention/linear_1/bias": (hidden,),
        "ffn/linear_0/weight": (ffn, hidden),
        "ffn/linear_0/bias": (ffn,),
        "ffn/linear_1/weight": (hidden, ffn),
        "ffn/linear_1/bias": (hidden,),
    }


def _t5_spec(config: T5Config) -> model_spec.ModelSpec:
    spec = transformer_spec.TransformerSpec.from_config(
        (config.num_layers, config.num_decoder_layers),
        config.num_heads,
        pre_norm=True,
        activation=common_spec.Activation.GELUTanh,
        ffn_glu=config.gated,
        relative_attention_bias=True,
        rms_norm=True,
    )
    distance = np.dtype("int32").type(config.max_distance)
    for stack in (spec.encoder, spec.decoder):
        stack.scale_embeddings = False
        for layer in stack.layer:
            layer.self_attention.relative_attention_max_distance = distance
            layer.self_attention.queries_scale = 1.0
    for layer in spec.decoder.layer:
        layer.attention.queries_scale = 1.0
    return spec


def _t5_shapes(config: T5Config) -> dict[str, tuple[int, ...]]:
    hidden, inner, ffn = config.hidden_size, config.inner_size, config.ffn_size
    return {
        "embeddings_0/weight": (config.vocab_size, hidden),
        "embeddings/weight": (config.vocab_size, hidden),
        "projection/weight": (config.vocab_size, hidden),
        "gamma": (hidden,),
        "relative_attention_bias": (config.num_buckets, config.num_heads),
        "self_attention/linear_0/weight": (3 * inner, hidden),
        "self_attention/linear_1/weight": (hidden, inner),
        "/attention/linear_0/weight": (inner, hidden),
        "/attention/linear_1/weight": (2 * inner, hidden),
        "/attention/linear_2/weight": (hidden, inner),
        "ffn/linear_0/weight": (ffn, hidden),
        "ffn/linear_0_noact/weight": (ffn, hidden),
        "ffn/linear_1/weight": (hidden, ffn),
    }


def _fill(spec: model_spec.ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Give every tensor whose name ends with a key its shape and random numbers."""
    small, gains = random_bits(0.0), random_bits(1.0)

    def fill(part: model_spec.LayerSpec, name: str, _: object) -> None:
        shape = next((shape for ending, shape in shapes.items() if name.endswith(ending)), None)
        if shape is not None:
            values = RandomBits(shape, gains if name.endswith("gamma") else small)
            setattr(part, name.rpartition("/")[2], values)

    model_spec.visit_spec(spec, fill)


def _tokens(ids: Sequence[int]) -> list[str]:
    return [str(token) for token in ids]


class Model:
    """A written model in memory; generates greedily and never ends a row early."""

    def __init__(self, folder: Path, config: GPTConfig | T5Config, device: str) -> None:
        kind = ctranslate2.Translator if isinstance(config, T5Config) else ctranslate2.Generator
        # Batches that run at the same time share the weights; each has a stream of its own.
        parallel = max(strategy["parts"] for strategy in STRATEGIES.values())
        self._model = kind(
            str(folder), device, compute_type=COMPUTE_TYPES[device], inter_threads=parallel
        )
        self._is_t5 = isinstance(config, T5Config)

    def generate(self, prompts: Sequence[Sequence[int]], output_len: int) -> list[int]:
        """How many tokens every row of prompts [B, S] got."""
        rows = [_tokens(prompt) for prompt in prompts]
        if self._is_t5:
            results = self._model.translate_batch(
                rows,
                beam_size=1,
                max_decoding_length=output_len,
                min_decoding_length=output_len,
            )
            return [len(result.hypotheses[0]) for result in results]
        results = self._model.generate_batch(
            rows,
            max_length=output_len,
            min_length=output_len,
            include_prompt_in_result=False,
        )
        return [len(result.sequences_ids[0]) for result in results]

    def serve(self, requests: Sequence[GenerateRequest], strategy: str) -> int:
        """Ask a GPT requests of different lengths at once, in one of the STRATEGIES.

        Rows leave by a function that is called for every token. Several batches are of requests
        that CTranslate2 has sorted by their length. Returns the tokens of all answers.
        """
        leave_early, parts = STRATEGIES[strategy]["leave_early"], STRATEGIES[strategy]["parts"]
        most = max(request.output_len for request in requests)
        left = [request.output_len for request in requests]
        chosen: dict[str, Callable[[Any], bool]] = {}
        if leave_early:

            def is_last(token: Any) -> bool:
                left[token.batch_id] -= 1
                return left[token.batch_id] == 0

            chosen["callback"] = is_last
        results = self._model.generate_batch(
            [_tokens(request.input_ids) for request in requests],
            max_batch_size=-(-len(requests) // parts) if parts > 1 else 0,
            max_length=most,
            min_length=most,
            include_prompt_in_result=False,
            **chosen,
        )
        wanted = [request.output_len for request in requests]
        for result, output_len in zip(results, wanted, strict=True):
            if len(result.sequences_ids[0]) != (output_len if leave_early else most):
                raise RuntimeError(f"{len(result.sequences_ids[0])} tokens came")
        return sum(wanted)
