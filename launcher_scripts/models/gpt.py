"""GPT: decoder-only transformers as NeMo, Megatron-LM and FasterTransformer know them.

The table of their weights is in gpt_weights.py.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any

from launcher_scripts.common.errors import Problems
from launcher_scripts.common.parallelism import divisors
from launcher_scripts.models import mixers
from launcher_scripts.models.adapters import NO_ADAPTERS, Adapters, AdapterSizes
from launcher_scripts.models.draft_heads import DraftHeadSizes
from launcher_scripts.models.family import ACTIVATIONS, NORMALIZATIONS, XIELU, numbers_in
from launcher_scripts.models.mixers import MixerSizes
from launcher_scripts.models.side_streams import StreamSizes

SCORE_FUNCTIONS = ("softmax", "sigmoid", "sparsemixer")
NORM_PLACEMENTS = ("pre", "post", "sandwich", "branch")
ROTARY_SCALINGS = ("llama3", "factors", "longrope", "dynamic")

_CLIP = "attention_clip"
_LONG = ("rotary_factors", "rotary_long_factors", "rotary_original_positions")
_NEEDED_OF_SCALING = {
    "llama3": (
        *("rotary_scaling_factor", "rotary_low_frequency_factor"),
        *("rotary_high_frequency_factor", "rotary_original_positions"),
    ),
    "factors": ("rotary_factors",),
    "longrope": _LONG,
    "dynamic": ("rotary_scaling_factor", "rotary_original_positions"),
}


def expert_groups(count: int, per_token: int, num_scores: int) -> dict[str, int]:
    """The fields of a GPTConfig with experts in groups; none of a single group."""
    names = ("num_expert_groups", "groups_per_token", "group_score_experts")
    return {} if count == 1 else dict(zip(names, (count, per_token, num_scores), strict=True))


@dataclass(frozen=True)
class GPTConfig(StreamSizes, AdapterSizes, MixerSizes, DraftHeadSizes):
    """Hyperparameters of a GPT.

    head_size is independent of hidden_size / num_heads. `activation` "gelu" is the tanh form,
    "gelu_erf" the exact one; with `gated` the MLP is act(x W) * (x W2), with "clamped_swiglu" as
    common/quantization.py says. rotary positions turn the
    first head_size * rotary_percentage dimensions by halves, at speeds that rotary_scaling changes
    (see engine/model/rotary.py). alibi_scale multiplies the ALiBi bias, alibi_layer_scaling by the
    1-based layer number (NeMo's apply_query_key_layer_scaling). attention_bias is of queries, keys
    and values, and of the output projection unless attention_dense_bias says otherwise. With
    qk_norm the heads' queries and keys are normalized before they turn, by a norm of the model's
    kind over head_size; with joint_qk_norm, over all heads of a token together; with
    qk_norm_after_rope, after they turn; with qk_norm_per_head by weights of each head. Layers that
    qk_norm_layers does not name have none. attention_clip bounds queries, keys and values then.
    "xielu" has parameters of its own in every layer.

    norm_placement "sandwich" normalizes a branch's input and its output, "branch" its output alone.
    With parallel_residual attention and MLP read the same hidden states. zero_centered_norm: norms
    multiply by their weight plus 1. Embeddings of tokens are multiplied by embedding_scale, scores
    q.k by softmax_scale (head_size ** -0.5 where it is not said), logits by logits_scale before
    their bias is added. A softcap c turns a score or a logit x to c * tanh(x / c). With
    attention_sinks every head has a score of no token beside those of the tokens.

    A layer attends to the last sliding_window tokens, the token's own included, and to all if
    full_attention_layers names it (numbers with commas between; every layer has the window where it
    is not said). Layers with the window turn by rotary_local_base, unscaled, where it is said.
    Layers that unrotated_layers names, in the same way, do not turn. With rotary_layer_bases each
    layer has its own base instead, and does not turn where that is 0. With sink_layers only these
    have attention_sinks.

    With num_experts a layer has so many MLPs of ffn_size, of which a token goes through
    experts_per_token; with shared_expert_size it has one more, which every token goes through,
    weighed by a gate unless shared_expert_gate is False. Layers that dense_layers names have one
    MLP of dense_ffn_size instead. Experts are chosen and weighed by router_score_function
    ("softmax" where it is not said), expert_bias, normalized_experts and router_scaling_factor, as
    kernels/operands.py says of a Router, whose linear has a bias with router_bias. mlp_bias is of
    every expert, too. With moe_latent_size they read and make so many numbers, between two
    projections that all of a layer share. With num_expert_groups only the experts of the
    groups_per_token best of these groups can be chosen, each as good as the sum of its
    group_score_experts best scores (1 where it is not said).

    With attention_output_gate what attention gives is multiplied by the sigmoid of one more
    projection. layer_branches names the branches of every layer, with commas between the layers:
    MIXERS and BRANCHES have their kinds, / stands between those that come one after the other, +
    between those that read the same, and none for a layer without any.
    layer_num_kv_heads, layer_head_sizes and layer_ffn_sizes are every layer's, with commas between.
    With value_norm every head's values are normalized, by an RMS norm without weights; with
    layer_scale what a layer makes of hidden states is multiplied by a number of its own.

    With experts_scale_input the weights multiply what experts read, not what they add; what a
    shared expert adds is multiplied by shared_expert_scale. With expert_norms the router and the
    experts read hidden states behind norms of their own, what the experts and what the shared one
    add are normalized before they are summed, and every expert's weight has a factor.

    With kv_lora_rank attention is latent (DeepSeek-V2, arXiv:2405.04434): keys and values of all
    heads are made of one latent vector of that size, which a norm of its own comes before, and of
    rope_head_size further numbers, the part of every head's key that turns. A query has head_size
    numbers, those that turn last, and is made of a latent vector of q_lora_rank where that is said;
    a value has value_head_size. attention_bias is of what makes the latent vectors and of the
    output projection. latent_norm_eps is of the norms of the latent vectors, norm_eps where it is
    not said.
    """

    title = "GPT"

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
    rotary_scaling: str | None = None
    rotary_scaling_factor: float | None = None
    rotary_low_frequency_factor: float | None = None
    rotary_high_frequency_factor: float | None = None
    rotary_original_positions: int | None = None
    rotary_factors: str | None = None
    rotary_long_factors: str | None = None
    rotary_attention_factor: float | None = None
    rotary_local_base: float | None = None
    rotary_layer_bases: str | None = None
    unrotated_layers: str | None = None
    alibi_layer_scaling: bool = False
    alibi_scale: float | None = None
    normalization: str = "layernorm"
    norm_eps: float = 1e-5
    norm_placement: str = "pre"
    embedding_norm: bool = False
    final_norm: bool = True
    activation: str = "gelu"
    gated: bool = False
    attention_bias: bool = True
    attention_dense_bias: bool | None = None
    qk_norm: bool | None = None
    joint_qk_norm: bool | None = None
    qk_norm_after_rope: bool | None = None
    qk_norm_per_head: bool | None = None
    qk_norm_layers: str | None = None
    mlp_bias: bool = True
    parallel_residual: bool | None = None
    zero_centered_norm: bool | None = None
    value_norm: bool | None = None
    layer_scale: bool | None = None
    embedding_scale: float | None = None
    softmax_scale: float | None = None
    logits_scale: float | None = None
    logits_bias: bool | None = None
    attention_softcap: float | None = None
    attention_clip: float | None = None
    attention_sinks: bool | None = None
    attention_output_gate: bool | None = None
    sink_layers: str | None = None
    logits_softcap: float | None = None
    sliding_window: int | None = None
    full_attention_layers: str | None = None
    num_experts: int | None = None
    experts_per_token: int | None = None
    normalized_experts: bool | None = None
    router_score_function: str | None = None
    router_scaling_factor: float | None = None
    router_bias: bool | None = None
    router_jitter: float | None = None
    experts_scale_input: bool | None = None
    expert_bias: bool | None = None
    expert_norms: bool | None = None
    num_expert_groups: int | None = None
    groups_per_token: int | None = None
    group_score_experts: int | None = None
    dense_layers: str | None = None
    dense_ffn_size: int | None = None
    layer_num_kv_heads: str | None = None
    layer_head_sizes: str | None = None
    layer_ffn_sizes: str | None = None
    shared_expert_size: int | None = None
    shared_expert_gate: bool | None = None
    moe_latent_size: int | None = None
    layer_branches: str | None = None
    shared_expert_scale: float | None = None
    kv_lora_rank: int | None = None
    q_lora_rank: int | None = None
    rope_head_size: int | None = None
    value_head_size: int | None = None
    latent_norm_eps: float | None = None
    tied_embeddings: bool = True
    start_id: int = 50256
    end_id: int = 50256
    pad_id: int | None = None
    parts: Adapters = NO_ADAPTERS

    def check(self, problems: Problems) -> None:
        self.check_fields(
            problems,
            ("num_kv_heads", "head_size", "max_positions"),
            {
                "position_embedding": ("learned", "rope", "alibi", "none"),
                "normalization": NORMALIZATIONS,
                "norm_placement": NORM_PLACEMENTS,
                "activation": (*ACTIVATIONS, XIELU),
            },
        )
        if not 0 < self.rotary_percentage <= 1:
            problems.add("rotary_percentage must be above 0, at most 1", got=self.rotary_percentage)
        self._check_rotary_scaling(problems)
        bases = numbers_in(problems, "rotary_layer_bases", self.rotary_layer_bases, float)
        if bases and (len(bases) != self.num_layers or min(bases) < 0):
            text = "rotary_layer_bases must be a number from 0 on for each layer"
            problems.add(text, got=self.rotary_layer_bases)
        if self.activation == XIELU and (self.gated or self.num_experts):
            problems.add("activation xielu is of an MLP without gate and experts")
        self._check_layer_sizes(problems)
        self._check_experts(problems)
        self._check_groups(problems)
        self._check_latent(problems)
        self.check_streams(problems, self.parts)
        if self.joint_qk_norm and not (self.qk_norm and self.normalization == "rmsnorm"):
            problems.add("joint_qk_norm needs qk_norm and rmsnorm", got=self.normalization)
        if self.qk_norm_per_head and (self.joint_qk_norm or self.qk_norm_after_rope):
            problems.add("qk_norm_per_head excludes joint_qk_norm and qk_norm_after_rope")
        if self.activation == "clamped_swiglu" and not self.gated:
            problems.add("activation clamped_swiglu needs gated", got=self.gated, choices=(True,))
        self.check_divides(problems, "num_kv_heads", "num_heads")
        if self.layer_branches is not None and not problems.messages:
            self._check_branch_kinds(problems)

    def _check_rotary_scaling(self, problems: Problems) -> None:
        if self.rotary_scaling is None:
            return
        if self.rotary_scaling not in ROTARY_SCALINGS:
            problems.add("unknown rotary_scaling", got=self.rotary_scaling, choices=ROTARY_SCALINGS)
        needed = _NEEDED_OF_SCALING.get(self.rotary_scaling, ())
        for name in needed:
            if not getattr(self, name):
                problems.add(f"rotary_scaling {self.rotary_scaling} needs {name}")
        low, high = self.rotary_low_frequency_factor, self.rotary_high_frequency_factor
        if low and high and low > high:
            problems.add(
                "rotary_low_frequency_factor must be at most rotary_high_frequency_factor",
                got=(low, high),
            )
        for name in ("rotary_factors", "rotary_long_factors"):
            factors = numbers_in(problems, name, getattr(self, name), float)
            if name in needed and (
                len(factors) != (self.rotary_size + 1) // 2 or min(factors, default=0) <= 0
            ):
                problems.add(
                    f"{name} must be a number above 0 for each of the {self.rotary_size // 2} "
                    "pairs of dimensions that turn",
                    got=len(factors),
                )

    def _check_branch_kinds(self, problems: Problems) -> None:
        """Note branches that the hyperparameters say nothing of, or cannot have."""
        mixers.check(self, problems, set(self.branch_kinds))
        if ("moe" in self.branch_kinds) != (self.num_experts is not None):
            problems.add("moe in layer_branches and num_experts need each other")
        if self.norm_placement != "pre" or self.parallel_residual:
            problems.add(
                "layer_branches needs norms before the branches, without parallel_residual",
                got=self.norm_placement,
                choices=("pre",),
            )
        if self.parts.ia3_num_tasks or self.parts.adapter_size:
            problems.add("IA3 and adapters of models with layer_branches are not supported")

    def _check_experts(self, problems: Problems) -> None:
        if self.num_experts is None:
            if self.dense_layers is not None:
                problems.add("dense_layers needs num_experts")
            return
        if not 1 <= (self.experts_per_token or 0) <= self.num_experts:
            problems.add(
                "experts_per_token is out of range",
                got=self.experts_per_token,
                choices=(f"1-{self.num_experts}",),
            )
        dense = self.dense_layers is not None
        if self.layer_branches is not None:
            dense = "mlp" in self.branch_kinds
        if dense != (self.dense_ffn_size is not None):
            problems.add("layers without experts and dense_ffn_size need each other")
        if self.dense_ffn_size is not None:
            problems.check_minimum("dense_ffn_size", self.dense_ffn_size, 1)
        if self.router_score_function is not None:
            function = self.router_score_function
            problems.check_choice("router_score_function", function, SCORE_FUNCTIONS)
        if self.norm_placement == "post":
            problems.add(
                "norms of models with experts do not follow the sums",
                got=self.norm_placement,
                choices=[name for name in NORM_PLACEMENTS if name != "post"],
            )
        if self.expert_norms and self.shared_expert_size is None:
            problems.add("expert_norms needs shared_expert_size")
        if self.router_score_function == "sparsemixer" and not self.router_jitter:
            problems.add("router_score_function sparsemixer needs router_jitter")
        if self.parts.ia3_num_tasks or self.parts.adapter_size:
            problems.add("IA3 and adapters of models with experts are not supported")
        if self.mlp_bias and self.shared_expert_size is not None:
            problems.add("shared experts with biases are not supported", got="mlp_bias = True")
        if any(stem.startswith("mlp.") for stem in self.parts.lora_targets):
            problems.add("LoRA of experts can only be merged", got=self.parts.lora_targets)

    def _check_groups(self, problems: Problems) -> None:
        count, selected = self.num_expert_groups, self.groups_per_token
        if count is None:
            return
        size = (self.num_experts or 0) // count if count > 0 else 0
        if not size or (self.num_experts or 0) % count:
            problems.add(
                "num_expert_groups must divide num_experts",
                got=count,
                choices=divisors(self.num_experts or 1),
            )
        elif not (selected and (self.experts_per_token or 0) <= selected * size <= count * size):
            first = -(-(self.experts_per_token or 1) // size)
            problems.add(
                "groups_per_token must be of groups with experts_per_token experts",
                got=selected,
                choices=(f"{first}-{count}",),
            )
        elif not 1 <= (self.group_score_experts or 1) <= size:
            problems.add(
                "group_score_experts is out of range",
                got=self.group_score_experts,
                choices=(f"1-{size}",),
            )

    def _check_latent(self, problems: Problems) -> None:
        sizes = ("rope_head_size", "value_head_size")
        if self.kv_lora_rank is None:
            for name in ("q_lora_rank", *sizes):
                if getattr(self, name) is not None:
                    problems.add(f"{name} needs kv_lora_rank", got=getattr(self, name))
            return
        for name in ("kv_lora_rank", *sizes):
            problems.check_minimum(name, getattr(self, name) or 0, 1)
        if self.q_lora_rank is not None:
            problems.check_minimum("q_lora_rank", self.q_lora_rank, 1)
        rope = self.rope_head_size or 0
        if rope % 2 or rope >= self.head_size:
            problems.add(
                "rope_head_size must be even and below head_size",
                got=rope,
                choices=(f"2-{self.head_size - 1}",),
            )
        if self.position_embedding not in ("rope", "none"):
            problems.add(
                "latent attention has rotary positions or none",
                got=self.position_embedding,
                choices=("rope", "none"),
            )
        if self.num_kv_heads != self.num_heads:
            problems.add(
                "latent attention makes keys and values of every head",
                got=self.num_kv_heads,
                choices=(self.num_heads,),
            )
        for name in ("qk_norm", "value_norm", "attention_sinks", "attention_softcap", _CLIP):
            if getattr(self, name):
                problems.add(f"{name} of latent attention is not supported")
        if self.parts.ia3_num_tasks:
            problems.add("IA3 of latent attention is not supported")

    @property
    def dense_bias(self) -> bool:
        """Return whether the attention's output projection has a bias."""
        flag = self.attention_dense_bias
        return self.attention_bias if flag is None else flag

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
    def attended_size(self) -> int:
        """What the attention's output projection reads."""
        return self.num_heads * (self.value_head_size or self.head_size)

    @property
    def kv_down_size(self) -> int:
        """Of a token's latent vector and the part of its key that turns: what the cache holds."""
        return (self.kv_lora_rank or 0) + (self.rope_head_size or 0)

    @property
    def kv_up_size(self) -> int:
        """Of all heads' keys, without the part that turns, and values."""
        return self.q_size - self.num_heads * (self.rope_head_size or 0) + self.attended_size

    @property
    def attention_scale(self) -> float:
        return float(self.softmax_scale or self.head_size**-0.5)

    @property
    def rotary_size(self) -> int:
        """Number of dimensions of a head that rotate."""
        return int((self.rope_head_size or self.head_size) * self.rotary_percentage)

    @property
    def expert_hidden_size(self) -> int:
        """What the experts read of a token, and add to it."""
        return self.moe_latent_size or self.hidden_size

    def unit_size(self, axis: str) -> int:
        if axis in mixers.UNITS:
            return int(getattr(self, mixers.UNITS[axis]))
        return self.head_size if axis in ("q_size", "kv_size") else int(getattr(self, axis))

    def rotates(self, layer: int) -> bool:
        """See ModelConfig."""
        return super().rotates(layer) and self.layer_base(layer) != 0

    def layer_kind(self, layer: int) -> tuple[Any, ...]:
        """See ModelConfig."""
        local = self.of_layer(layer)
        sizes = local.num_kv_heads, local.head_size, local.ffn_size
        return (*super().layer_kind(layer), self.layer_base(layer) or 0.0, *sizes)

    def of_layer(self, layer: int | None) -> GPTConfig:
        """See ModelConfig."""
        if layer is None or not self._layer_sizes:
            return self
        local = copy(self)
        for name, sizes in self._layer_sizes.items():
            if sizes[layer]:
                object.__setattr__(local, name, sizes[layer])
        return local

    @cached_property
    def _layer_sizes(self) -> dict[str, list[int]]:
        """Fields of one size, and every layer's; 0 for a layer that has none."""
        texts = {
            "num_kv_heads": self.layer_num_kv_heads,
            "head_size": self.layer_head_sizes,
            "ffn_size": self.layer_ffn_sizes,
        }
        return {name: [*map(int, text.split(","))] for name, text in texts.items() if text}

    def _check_layer_sizes(self, problems: Problems) -> None:
        names = ("layer_num_kv_heads", "layer_head_sizes", "layer_ffn_sizes")
        for name, full in zip(names, (self.num_heads, 0, 0), strict=True):
            sizes = numbers_in(problems, name, getattr(self, name), int)
            if sizes and (
                len(sizes) != self.num_layers
                or min(sizes) < 0
                or any(size and full % size for size in sizes)
            ):
                problems.add(f"{name} must be a size for each layer, or 0", got=getattr(self, name))

    def layer_base(self, layer: int) -> float | None:
        """Returns the layer's number in rotary_layer_bases, if there are such."""
        bases = (self.rotary_layer_bases or "").split(",")
        return float(bases[layer]) if len(bases) > layer and bases[layer] else None

    def tp_sizes(self) -> list[int]:
        layers = self._layer_sizes.get("ffn_size", ())
        linear = self.hidden_size if self.branch_kinds & {"linear", "linear_mlp"} else 0
        experts = (self.shared_expert_size or 0, self.dense_ffn_size or 0, linear, *layers)
        more = (self.adapter_size, mixers.tp_numbers(self), self.stream_tp_number())
        sizes = (self.ffn_size, *experts, *more)
        return divisors(gcd(self.num_heads, *sizes))

    def kv_copies(self, tp_size: int) -> int:
        """Number of ranks' worth of copies of each key/value head that `tp_size` ranks need.

        The smallest divisor of the group size that makes the copied heads divisible by tp_size;
        1 means that no head is replicated.
        """
        group = self.num_heads // self.num_kv_heads
        return next(n for n in divisors(group) if self.num_kv_heads * n % tp_size == 0)

    def local_size(self, axis: str, tp_size: int) -> int:
        if axis in ("kv_size", "num_kv_heads"):
            size: int = getattr(self, axis)
            return size * self.kv_copies(tp_size) // tp_size
        if axis == "qkv_size":
            return self.local_size("q_size", tp_size) + 2 * self.local_size("kv_size", tp_size)
        mixed = mixers.local_size(self, axis, tp_size)
        return super().local_size(axis, tp_size) if mixed is None else mixed
