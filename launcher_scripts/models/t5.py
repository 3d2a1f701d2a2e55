"""T5: encoder-decoder transformers as Hugging Face, NeMo and FasterTransformer know them.

Names and shapes of the stored tensors follow FasterTransformer's T5 checkpoint. One table covers
Google's T5 (RMS norm, no biases, unscaled attention) and NeMo's (layer norm, biases, scaled
attention); what FasterTransformer cannot represent (separate decoder embeddings, a relative bias
of the cross-attention or in every layer, either stack's own depth) extends the same file set, as
docs/checkpoint-format.md describes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from launcher_scripts.common.errors import Problems
from launcher_scripts.common.parallelism import divisors
from launcher_scripts.models.adapters import NO_ADAPTERS, Adapters, AdapterSizes
from launcher_scripts.models.family import ACTIVATIONS, NORMALIZATIONS, ExpertsOfStacks


@dataclass(frozen=True)
class T5Config(ExpertsOfStacks, AdapterSizes):
    """Hyperparameters of a T5.

    num_layers counts the encoder's layers. head_size is independent of hidden_size / num_heads.
    Attention scores are q.k * attention_scale; logits are x.W * logits_scale (+ the logits bias).
    `bias` stands for the biases of every linear layer; norms have one exactly when they are layer
    norms. With `gated` the MLP is act(x W) * (x W2); `activation` "gelu" is the tanh form.
    Learned positions have one table of max_positions rows per embedding.
    The layers of a stack share their relative bias unless relative_bias_per_layer (umT5).
    relative_bias_layer_scaling multiplies it by the 1-based layer number (NeMo's
    apply_query_key_layer_scaling). encoder_only models have no decoder and no head.

    The rest is T5Gemma's: num_kv_heads, fewer than the heads; rotary positions of rotary_base in
    the attention of a stack to itself; sandwich_norms, after a branch, too. zero_centered_norm,
    embedding_scale, softcaps and windows are as in GPTConfig, of both stacks; a token of the
    encoder attends to sliding_window tokens on either side.

    A T5Gemma 2 has merged_attention: one softmax of a decoder's layer covers the tokens before and
    the encoder's states, of which its keys and values are made by the same matrices. A token of its
    encoder attends to sliding_window tokens around it. qk_norm, rotary_local_base and
    rotary_interpolation_factor are as in GPTConfig.

    In a LongT5 (arXiv:2112.07916) a token of the encoder attends to the encoder_sliding_window
    tokens around it.

    A Switch Transformer (arXiv:2101.03961) has num_experts MLPs in the layers that
    encoder_expert_layers and decoder_expert_layers name, of which a token goes through the one that
    its router scores best, weighed by the softmax of the scores; router_bias is the router's.
    """

    title = "T5"

    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    head_size: int
    ffn_size: int
    num_decoder_layers: int
    position_embedding: str = "relative"
    num_buckets: int = 32
    max_positions: int = 512
    max_distance: int = 128
    cross_attention_relative_bias: bool = False
    relative_bias_layer_scaling: bool = False
    relative_bias_per_layer: bool | None = None
    normalization: str = "rmsnorm"
    norm_eps: float = 1e-6
    activation: str = "relu"
    gated: bool = False
    bias: bool = False
    logits_bias: bool = False
    attention_scale: float = 1.0
    logits_scale: float = 1.0
    tied_embeddings: bool = True
    shared_embeddings: bool = True
    encoder_only: bool = False
    start_id: int = 0
    end_id: int = 1
    pad_id: int | None = 0
    num_kv_heads: int | None = None
    rotary_base: float | None = None
    sandwich_norms: bool | None = None
    zero_centered_norm: bool | None = None
    embedding_scale: float | None = None
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    sliding_window: int | None = None
    full_attention_layers: str | None = None
    num_experts: int | None = None
    encoder_expert_layers: str | None = None
    decoder_expert_layers: str | None = None
    router_bias: bool | None = None
    merged_attention: bool | None = None
    qk_norm: bool | None = None
    rotary_local_base: float | None = None
    rotary_interpolation_factor: float | None = None
    encoder_sliding_window: int | None = None
    parts: Adapters = NO_ADAPTERS

    def check(self, problems: Problems) -> None:
        decoder = (
            () if self.encoder_only and not self.num_decoder_layers else ("num_decoder_layers",)
        )
        self.check_fields(
            problems,
            ("head_size", "num_buckets", "max_distance", "max_positions", *decoder),
            {
                "position_embedding": ("relative", "learned", "rope"),
                "normalization": NORMALIZATIONS,
                "activation": ACTIVATIONS,
            },
        )
        if self.position_embedding == "relative":
            self._check_buckets(problems)
        if (self.position_embedding == "rope") != (self.rotary_base is not None):
            problems.add("rotary_base and rope belong together", got=self.rotary_base)
        if self.num_kv_heads is not None:
            self.check_divides(problems, "num_kv_heads", "num_heads")
        if self.encoder_sliding_window is not None:
            problems.check_minimum("encoder_sliding_window", self.encoder_sliding_window, 1)
        self._check_experts(problems)

    def _check_experts(self, problems: Problems) -> None:
        self.check_expert_layers(problems)
        if self.num_experts is None:
            return
        if self.gated or self.bias or self.sandwich_norms:
            problems.add("experts of a T5 with gates, biases or norms after branches")
        if self.parts.ia3_num_tasks or self.parts.adapter_size:
            problems.add("IA3 and adapters of models with experts are not supported")

    def may_list(self, layer: int) -> bool:
        """Both stacks share a list; that of an encoder alone may be a longer decoder's."""
        return layer >= 0

    def _check_buckets(self, problems: Problems) -> None:
        """Half of a direction's buckets are one distance each, the others reach max_distance."""
        if self.num_buckets < 4:
            problems.add("num_buckets must be at least 4", got=self.num_buckets)
        exact = self.num_buckets // (4 if self.encoder_only else 2)
        if self.max_distance <= exact:
            message = f"max_distance must be more than {exact}, which have buckets of their own"
            problems.add(message, got=self.max_distance)

    @property
    def inner_size(self) -> int:
        """Width of the queries, the keys and the values of all heads."""
        return self.num_heads * self.head_size

    @property
    def kv_heads(self) -> int:
        """Heads of keys and of values."""
        return self.num_kv_heads or self.num_heads

    @property
    def decoder_kv_heads(self) -> int:
        return self.kv_heads

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_size

    def encoder_window(self, layer: int) -> int:
        """How many tokens around it a token of the encoder attends to in a layer; 0: all."""
        if self.encoder_sliding_window is not None:
            return self.encoder_sliding_window
        window = self.window(layer)
        return window if self.merged_attention or not window else 2 * window + 1

    @property
    def norm_placement(self) -> str:
        """In GPTConfig's words."""
        return "sandwich" if self.sandwich_norms else "pre"

    @property
    def num_decoder_heads(self) -> int:
        return self.num_heads

    @property
    def decoder_head_size(self) -> int:
        return self.head_size

    @property
    def decoder_attention_scale(self) -> float:
        return self.attention_scale

    @property
    def qkv_size(self) -> int:
        return self.inner_size + 2 * self.kv_size

    def tp_sizes(self) -> list[int]:
        return divisors(gcd(self.kv_heads, self.ffn_size, self.adapter_size))
