"""A GGUF file of the llama architecture as the state dict of a NeMo mcore GPT."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.layout.source_checkpoint import Hints
from launcher_scripts.checkpoint.layout.tasks import make_plan
from launcher_scripts.checkpoint.sources.gguf_checkpoint import GGUFCheckpoint
from launcher_scripts.checkpoint.sources.gguf_tokenizer import special_tokens
from launcher_scripts.checkpoint.sources.nemo_writer import Weight
from launcher_scripts.checkpoint.tokenizers.nemo_tokenizer import ARTIFACT
from launcher_scripts.common.errors import CheckpointError, problem
from launcher_scripts.models import gpt_weights
from launcher_scripts.models.gpt import GPTConfig

ARCHITECTURE = "llama"
CONFIG = Path(__file__).with_name("nemo_llama_config.yaml")

VOCABULARY_MULTIPLE = 128  # make_vocab_size_divisible_by of nemo_llama_config.yaml

EMBEDDING, OUTPUT, FINAL_NORM = "embed_tokens.weight", "lm_head.weight", "norm.weight"
# mcore key -> Hugging Face's tensor, where one is the other.
PER_LAYER = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}


class GGUFLlama:
    """An open GGUF file; tensors are dequantised to float32 when they are read.

    Raises CheckpointError when the file is of another architecture, lacks fields or tensors, or has
    what nemo_llama_config.yaml does not speak of: biases, scaled rotary positions.
    """

    def __init__(self, path: Path) -> None:
        self.checkpoint = GGUFCheckpoint.open(Archive(path), Hints())
        self.metadata = self.checkpoint.metadata
        config, architecture = self.checkpoint.config, self.checkpoint.architecture
        plain = _plain(config) if isinstance(config, GPTConfig) else None
        if architecture != ARCHITECTURE or plain is None or config != plain:
            raise CheckpointError(problem(f"{path} is not a plain Llama", got=architecture))
        self.shape = plain
        make_plan(self.checkpoint, gpt_weights.weights(self.shape), f"the GGUF file {path}")

    @property
    def tied_embeddings(self) -> bool:
        """Whether the output layer is the embedding table."""
        return self.shape.tied_embeddings

    def weights(self, query_groups: int | None = None) -> dict[str, Weight]:
        """The mcore GPT state dict, keys without the prefix `model.`.

        query_groups: at least the file's number of key/value heads. Further groups are filled
        with zeros, the output projection's columns included, so that the model computes the same
        function with a number of heads that more tensor-parallel sizes divide.
        """
        groups = query_groups or self.shape.num_kv_heads
        if groups < self.shape.num_kv_heads:
            raise CheckpointError(
                problem(
                    "query_groups must not be less than the key/value heads of the file",
                    got=groups,
                    choices=(f"{self.shape.num_kv_heads} or more",),
                )
            )
        weights = {
            "embedding.word_embeddings.weight": self._vocabulary(EMBEDDING),
            "decoder.final_layernorm.weight": self._weight(FINAL_NORM),
        }
        if not self.tied_embeddings:
            weights["output_layer.weight"] = self._vocabulary(OUTPUT)
        for layer in range(self.shape.num_layers):
            for key, value in self._layer(f"layers.{layer}", groups).items():
                weights[f"decoder.layers.{layer}.{key}"] = value
        return weights

    def _layer(self, block: str, groups: int) -> dict[str, Weight]:
        shape = self.shape
        heads = shape.num_heads // shape.num_kv_heads  # query heads of one group
        qkv_rows = groups * (heads + 2) * shape.head_size
        return {
            **{key: self._weight(f"{block}.{name}") for key, name in PER_LAYER.items()},
            "self_attention.linear_qkv.weight": Weight(
                (qkv_rows, shape.hidden_size), partial(self._qkv, block, groups)
            ),
            "self_attention.linear_proj.weight": Weight(
                (shape.hidden_size, groups * heads * shape.head_size),
                partial(self._projection, block, groups),
            ),
            "mlp.linear_fc1.weight": Weight(
                (2 * shape.ffn_size, shape.hidden_size), partial(self._gate_and_up, block)
            ),
        }

    def read(self, name: str) -> NDArray[Any]:
        """One tensor as float32, rows as output features, in Hugging Face's order."""
        return self.checkpoint.tensors[name].read()

    def _weight(self, name: str) -> Weight:
        return Weight(self.checkpoint.tensors[name].shape, partial(self.read, name))

    def _vocabulary(self, name: str) -> Weight:
        """A table with a row per token, filled up with zeros to a multiple as NeMo does."""
        rows = self.shape.vocab_size
        padding = -rows % VOCABULARY_MULTIPLE
        return Weight(
            (rows + padding, self.shape.hidden_size),
            lambda: np.pad(self.read(name), ((0, padding), (0, 0))) if padding else self.read(name),
        )

    def _qkv(self, block: str, groups: int) -> NDArray[Any]:
        """[groups * (heads of a group + 2) * head_size, hidden]: q.. k v of every group."""
        shape = self.shape
        q, k, v = (self.read(f"{block}.self_attn.{part}_proj.weight") for part in "qkv")
        rows = (shape.num_kv_heads, -1, shape.head_size, shape.hidden_size)
        parts = [part.reshape(rows) for part in (q, k, v)]
        merged = np.concatenate(parts, axis=1)  # [G, H/G + 2, D, hidden]
        padding = ((0, groups - shape.num_kv_heads), (0, 0), (0, 0), (0, 0))
        return np.pad(merged, padding).reshape(-1, shape.hidden_size)

    def _projection(self, block: str, groups: int) -> NDArray[Any]:
        """[hidden, groups * heads of a group * head_size]."""
        weight = self.read(f"{block}.self_attn.o_proj.weight")
        per_group = weight.shape[1] // self.shape.num_kv_heads
        return np.pad(weight, ((0, 0), (0, (groups - self.shape.num_kv_heads) * per_group)))

    def _gate_and_up(self, block: str) -> NDArray[Any]:
        parts = [self.read(f"{block}.mlp.{part}_proj.weight") for part in ("gate", "up")]
        return np.concatenate(parts)


def _plain(config: GPTConfig) -> GPTConfig:
    """The Llama of the same sizes that has nothing else."""
    sizes = ("vocab_size", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_size")
    others = ("ffn_size", "max_positions", "rotary_base", "norm_eps", "tied_embeddings")
    ids = ("start_id", "end_id", "pad_id")
    return GPTConfig(
        position_embedding="rope",
        normalization="rmsnorm",
        activation="silu",
        gated=True,
        attention_bias=False,
        mlp_bias=False,
        **{name: getattr(config, name) for name in (*sizes, *others, *ids)},
    )


def nemo_config(
    llama: GGUFLlama, artifacts: Mapping[str, str], query_groups: int
) -> dict[str, Any]:
    """NeMo's model_config.yaml for the weights that `llama.weights(query_groups)` gives.

    artifacts: key of section `tokenizer` -> name of the artifact: `model`, and of COMPANIONS
    """
    shape = llama.shape
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    config |= {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_size,
        "num_attention_heads": query_groups * (shape.num_heads // shape.num_kv_heads),
        "num_query_groups": query_groups,
        "kv_channels": shape.head_size,
        "encoder_seq_length": shape.max_positions,
        "max_position_embeddings": shape.max_positions,
        "layernorm_epsilon": shape.norm_eps,
        "rotary_base": shape.rotary_base,
        "share_embeddings_and_output_weights": llama.tied_embeddings,
    }
    config["tokenizer"] |= {
        "library": "huggingface",
        **{key: f"{ARTIFACT}{name}" for key, name in artifacts.items()},
        "special_tokens": special_tokens(llama.metadata),
    }
    config["data"]["seq_length"] = shape.max_positions
    return config
