"""transformers' models of our shapes, with random bfloat16 weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from launcher_scripts.models.gpt import GPTConfig
from launcher_scripts.models.t5 import T5Config

VERSION = transformers.__version__


def write(folder: Path, config: GPTConfig | T5Config) -> None:
    """Nothing has to be written: the weights are made where they are used."""


class Model:
    """A model in memory, used through generate; greedy, and no row ends early."""

    def __init__(self, folder: Path, config: GPTConfig | T5Config, device: str) -> None:  # noqa: ARG002
        # cuDNN's attention would first build a plan for every new length of the cache.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self._device = torch.device(device)
        self._is_t5 = isinstance(config, T5Config)
        with self._device:
            self._model = (_t5(config) if self._is_t5 else gpt2(config)).eval()

    def generate(self, prompts: Sequence[Sequence[int]], output_len: int) -> list[int]:
        """How many tokens every row of prompts [B, S] got."""
        return [len(row) for row in self.new_tokens(prompts, output_len)]

    def new_tokens(self, prompts: Sequence[Sequence[int]], output_len: int) -> list[list[int]]:
        """What every row of prompts [B, S] got."""
        ids = torch.tensor(prompts, device=self._device)
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=output_len,
            min_new_tokens=output_len,
            do_sample=False,
            pad_token_id=0,
        )
        before = 1 if self._is_t5 else ids.shape[1]
        return [row[before:] for row in out.tolist()]


def gpt2(config: GPTConfig) -> transformers.GPT2LMHeadModel:
    return transformers.GPT2LMHeadModel._from_config(
        transformers.GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.max_positions,
            n_embd=config.hidden_size,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            bos_token_id=0,
            eos_token_id=None,
        ),
        dtype=torch.bfloat16,
    )


def _t5(config: T5Config) -> transformers.T5ForConditionalGeneration:
    return transformers.T5ForConditionalGeneration._from_config(
        transformers.T5Config(
            vocab_size=config.vocab_size,
            d_model=config.hidden_size,
            d_kv=config.head_size,
            d_ff=config.ffn_size,
            num_layers=config.num_layers,
            num_decoder_layers=config.num_decoder_layers,
            num_heads=config.num_heads,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
            dropout_rate=0.0,
            pad_token_id=0,
            decoder_start_token_id=0,
            eos_token_id=None,
        ),
        dtype=torch.bfloat16,
    )
