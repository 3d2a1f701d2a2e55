"""A GGUF file of the llama architecture as the state dict of a NeMo mcore GPT.

GGUF is llama.cpp's format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Its
converter stores the rows of the query and key projections so that neighbouring rows rotate
together; NeMo and Hugging Face rotate by halves, so the rows are put back in order here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from gguf import ReaderTensor, dequantize

from launcher_scripts.checkpoint.gguf_file import open_gguf
from launcher_scripts.checkpoint.gguf_tokenizer import special_tokens, tokenizer_metadata
from launcher_scripts.checkpoint.nemo_writer import Weight
from launcher_scripts.errors import CheckpointError, Problems, problem

ARCHITECTURE = "llama"
CONFIG = Path(__file__).with_name("nemo_llama_config.yaml")

VOCABULARY_MULTIPLE = 128  # make_vocab_size_divisible_by of nemo_llama_config.yaml

EMBEDDING, OUTPUT, FINAL_NORM = "token_embd.weight", "output.weight", "output_norm.weight"
# mcore key -> GGUF tensor, where one is the other.
PER_LAYER = {
    "self_attention.linear_qkv.layer_norm_weight": "attn_norm.weight",
    "mlp.linear_fc1.layer_norm_weight": "ffn_norm.weight",
    "mlp.linear_fc2.weight": "ffn_down.weight",
}


@dataclass(frozen=True)
class LlamaShape:
    """Hyperparameters of the file, in the project's words."""

    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_positions: int
    rotary_base: float
    norm_eps: float


class GGUFLlama:
    """An open GGUF file; tensors are dequantised to float32 when they are read.

    Raises CheckpointError when the file is of another architecture or lacks fields or tensors.
    """

    def __init__(self, path: Path) -> None:
        self.reader = open_gguf(path)
        self.path = path
        self.tensors: dict[str, ReaderTensor] = {item.name: item for item in self.reader.tensors}
        self.shape = self._read_shape()
        self._check_tensors()

    @property
    def tied_embeddings(self) -> bool:
        """Whether the output layer is the embedding table."""
        return OUTPUT not in self.tensors

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
            for key, value in self._layer(f"blk.{layer}", groups).items():
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

    def read(self, name: str) -> np.ndarray:
        """One tensor as float32, rows as output features."""
        tensor = self.tensors[name]
        return dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)

    def _weight(self, name: str) -> Weight:
        tensor = self.tensors[name]
        shape = tuple(int(size) for size in reversed(tensor.shape))
        return Weight(shape, partial(self.read, name))

    def _vocabulary(self, name: str) -> Weight:
        """A table with a row per token, filled up with zeros to a multiple as NeMo does."""
        rows = self.shape.vocab_size
        padding = -rows % VOCABULARY_MULTIPLE
        return Weight(
            (rows + padding, self.shape.hidden_size),
            lambda: np.pad(self.read(name), ((0, padding), (0, 0))) if padding else self.read(name),
        )

    def _qkv(self, block: str, groups: int) -> np.ndarray:
        """[groups * (heads of a group + 2) * head_size, hidden]: q.. k v of every group."""
        shape = self.shape
        q, k, v = (self.read(f"{block}.attn_{part}.weight") for part in "qkv")
        rows = (shape.num_kv_heads, -1, shape.head_size, shape.hidden_size)
        parts = [_halves(q, shape).reshape(rows), _halves(k, shape).reshape(rows), v.reshape(rows)]
        merged = np.concatenate(parts, axis=1)  # [G, H/G + 2, D, hidden]
        padding = ((0, groups - shape.num_kv_heads), (0, 0), (0, 0), (0, 0))
        return np.pad(merged, padding).reshape(-1, shape.hidden_size)

    def _projection(self, block: str, groups: int) -> np.ndarray:
        """[hidden, groups * heads of a group * head_size]."""
        weight = self.read(f"{block}.attn_output.weight")
        per_group = weight.shape[1] // self.shape.num_kv_heads
        return np.pad(weight, ((0, 0), (0, (groups - self.shape.num_kv_heads) * per_group)))

    def _gate_and_up(self, block: str) -> np.ndarray:
        parts = [self.read(f"{block}.ffn_{part}.weight") for part in ("gate", "up")]
        return np.concatenate(parts)

    def _read_shape(self) -> LlamaShape:
        problems = Problems(f"the GGUF file {self.path}")

        def field(name: str) -> Any:
            entry = self.reader.get_field(name)
            if entry is None:
                problems.add(f"missing field {name}")
                return 1
            try:
                return entry.contents()
            except UnicodeDecodeError:
                problems.add(f"field {name} is no text")
                return 1

        architecture = field("general.architecture")
        if architecture != ARCHITECTURE:
            problems.add("unknown architecture", got=architecture, choices=(ARCHITECTURE,))
            problems.raise_if_any(CheckpointError)

        def size(name: str) -> int:
            found = field(f"{ARCHITECTURE}.{name}")
            if type(found) is int and found > 0:
                return found
            problems.add(f"{name} must be a whole number from 1 on", got=found)
            return 1

        def real(name: str) -> float:
            found = field(f"{ARCHITECTURE}.{name}")
            if type(found) in (int, float):
                return float(found)
            problems.add(f"{name} must be a number", got=found)
            return 1.0

        shape = LlamaShape(
            num_layers=size("block_count"),
            hidden_size=size("embedding_length"),
            ffn_size=size("feed_forward_length"),
            num_heads=size("attention.head_count"),
            num_kv_heads=size("attention.head_count_kv"),
            head_size=size("rope.dimension_count"),
            vocab_size=size("vocab_size"),
            max_positions=size("context_length"),
            rotary_base=real("rope.freq_base"),
            # Stored as float32; the shortest decimal that gives it is what was meant.
            norm_eps=float(str(np.float32(real("attention.layer_norm_rms_epsilon")))),
        )
        problems.raise_if_any(CheckpointError)
        return shape

    def _check_tensors(self) -> None:
        names = {EMBEDDING, FINAL_NORM}
        parts = [*PER_LAYER.values()]
        parts += [f"attn_{part}.weight" for part in ("q", "k", "v", "output")]
        parts += [f"ffn_{part}.weight" for part in ("gate", "up")]
        problems = Problems(f"the GGUF file {self.path}")
        if self.shape.num_layers > len(self.tensors):
            problems.add("block_count is more than there are tensors", got=self.shape.num_layers)
            problems.raise_if_any(CheckpointError)
        for layer in range(self.shape.num_layers):
            names.update(f"blk.{layer}.{part}" for part in parts)
        for name in sorted(names - self.tensors.keys()):
            problems.add(f"missing tensor {name}")
        for name in sorted(self.tensors.keys() - names - {OUTPUT}):
            problems.add(f"unknown tensor {name}")
        problems.raise_if_any(CheckpointError)


def _halves(weight: np.ndarray, shape: LlamaShape) -> np.ndarray:
    """Rows in the order that rotates by halves, from the order that rotates neighbours."""
    rows = weight.reshape(-1, shape.head_size // 2, 2, weight.shape[1])
    return rows.swapaxes(1, 2).reshape(weight.shape)


def nemo_config(llama: GGUFLlama, tokenizer: str, query_groups: int) -> dict[str, Any]:
    """NeMo's model_config.yaml for the weights that `llama.weights(query_groups)` gives.

    tokenizer: name of the artifact that holds tokenizer.json
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
        "model": f"nemo:{tokenizer}",
        "special_tokens": special_tokens(tokenizer_metadata(llama.reader)),
    }
    config["data"]["seq_length"] = shape.max_positions
    return config
