"""GPT: decoder-only transformers as NeMo, Megatron-LM and FasterTransformer know them.

Names and shapes of the stored tensors follow FasterTransformer's GPT checkpoint; what it cannot
represent (gated activations, rotary positions, RMS norm, grouped queries) extends the same file
set, as docs/checkpoint-format.md describes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from launcher_scripts.errors import CheckpointError, Problems
from launcher_scripts.models.family import Partition, Source, WeightSpec
from launcher_scripts.parallel import divisors

POSITION_EMBEDDINGS = ("learned", "rope", "alibi", "none")
NORMALIZATIONS = ("layernorm", "rmsnorm")
NORM_PLACEMENTS = ("pre", "post")
ACTIVATIONS = ("gelu", "gelu_erf", "relu", "silu", "squared_relu")


@dataclass(frozen=True)
class GPTConfig:
    """Hyperparameters of a GPT.

    head_size is independent of hidden_size / num_heads. `activation` "gelu" is the tanh form,
    "gelu_erf" the exact one; with `gated` the MLP is act(x W) * (x W2). rotary positions turn the
    first head_size * rotary_percentage dimensions by halves. alibi_layer_scaling multiplies the
    ALiBi bias by the 1-based layer number (NeMo's apply_query_key_layer_scaling).
    """

    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn_size: int
    max_positions: int
    position_embedding: str = "learned"
    rotary_percentage: float = 1.0
    rotary_base: float = 10000.0
    rotary_interpolation_factor: float = 1.0
    alibi_layer_scaling: bool = False
    normalization: str = "layernorm"
    norm_eps: float = 1e-5
    norm_placement: str = "pre"
    embedding_norm: bool = False
    final_norm: bool = True
    activation: str = "gelu"
    gated: bool = False
    attention_bias: bool = True
    mlp_bias: bool = True
    tied_embeddings: bool = True
    start_id: int = 50256
    end_id: int = 50256
    pad_id: int | None = None

    def __post_init__(self) -> None:
        problems = Problems("the GPT hyperparameters")
        sizes = ("vocab_size", "num_layers", "hidden_size", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_size", "ffn_size", "max_positions"):
            if getattr(self, name) < 1:
                problems.add(f"{name} must be at least 1", got=getattr(self, name))
        for name, choices in (
            ("position_embedding", POSITION_EMBEDDINGS),
            ("normalization", NORMALIZATIONS),
            ("norm_placement", NORM_PLACEMENTS),
            ("activation", ACTIVATIONS),
        ):
            if getattr(self, name) not in choices:
                problems.add(f"unknown {name}", got=getattr(self, name), choices=choices)
        if not problems.messages and self.num_heads % self.num_kv_heads:
            problems.add(
                "num_kv_heads must divide num_heads",
                got=self.num_kv_heads,
                choices=divisors(self.num_heads),
            )
        problems.raise_if_any(CheckpointError)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_size

    @property
    def qkv_size(self) -> int:
        return self.q_size + 2 * self.kv_size

    @property
    def rotary_size(self) -> int:
        """How many dimensions of a head rotate."""
        return int(self.head_size * self.rotary_percentage)

    def tp_sizes(self) -> list[int]:
        return divisors(gcd(self.num_heads, self.ffn_size))

    def kv_copies(self, tp_size: int) -> int:
        """How many ranks' worth of copies of each key/value head `tp_size` ranks need.

        The smallest divisor of the group size that makes the copied heads divisible by tp_size;
        1 means that no head is replicated.
        """
        group = self.num_heads // self.num_kv_heads
        return next(n for n in divisors(group) if self.num_kv_heads * n % tp_size == 0)

    def local_size(self, axis: str, tp_size: int) -> int:
        if axis == "kv_size":
            return self.kv_size * self.kv_copies(tp_size) // tp_size
        if axis == "qkv_size":
            return self.local_size("q_size", tp_size) + 2 * self.local_size("kv_size", tp_size)
        if axis == "vocab_size":
            return -(-self.vocab_size // tp_size)
        size: int = getattr(self, axis)
        return size // tp_size
