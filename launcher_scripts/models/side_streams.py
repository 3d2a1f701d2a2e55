"""Inputs of a GPT's layers besides hidden states and their own keys and values.

Gemma 3n and Gemma 4 have an embedding of every token for each layer, layers that attend to the keys
and values of an earlier one, and, Gemma 3n, several streams of hidden states of which a layer reads
one (alternating updates, arXiv:2301.13310).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from launcher_scripts.common.errors import Problems
from launcher_scripts.models.family import (
    ModelConfig,
    Partition,
    Source,
    WeightSpec,
    numbers_in,
)
from launcher_scripts.models.mixers import Linears


@dataclass(frozen=True, kw_only=True)
class StreamSizes(ModelConfig):
    """Hyperparameters of what layers read besides.

    With layer_input_size the last branch of a layer is a linear to so many numbers, the MLP's
    activation, a product with the token's input of the layer, and a linear back. That input is the
    sum of an embedding of the layer's own and a normalized linear of the token's embedding, over
    sqrt(2). layer_kv_sources says of every layer whose keys and values it attends to: its own
    number, or that of an earlier layer of the same window, heads and sizes.

    With num_streams there are so many hidden states of a token. A layer predicts all from all, its
    branches read the one of number active_stream, and it corrects all by what they made of it; its
    input of the token is added to all but the first, and is made of the active one, which is
    multiplied by weights of its own with scaled_stream. With laurel_rank the norm of attention's
    input goes through two linears around so many numbers, a norm, and is added with itself; the sum
    is over sqrt(2). With layer_sparsities an MLP's activation reads what its numbers have above the
    bound that this share of as many normal numbers would not reach (every layer's; 0: no bound).
    """

    layer_input_size: int | None = None
    layer_kv_sources: str | None = None
    num_streams: int | None = None
    active_stream: int | None = None
    scaled_stream: bool | None = None
    laurel_rank: int | None = None
    layer_sparsities: str | None = None

    @property
    def stream_coefficients(self) -> int:
        """The numbers that predict every stream of every stream."""
        return (self.num_streams or 0) ** 2

    def branches(self, layer: int) -> tuple[tuple[str, ...], ...]:
        """See ModelConfig."""
        result = super().branches(layer)
        if self.laurel_rank:
            result = tuple((*both, "laurel") if "attention" in both else both for both in result)
        return (*result, ("layer_input",)) if self.layer_input_size else result

    @property
    def branch_kinds(self) -> frozenset[str]:
        """See ModelConfig."""
        more = ["layer_input"] * bool(self.layer_input_size) + ["laurel"] * bool(self.laurel_rank)
        return super().branch_kinds | {*more}

    def layer_kind(self, layer: int) -> tuple[Any, ...]:
        """See ModelConfig."""
        return (*super().layer_kind(layer), self.has_keys(layer), self.sparsity(layer))

    def selected(self, layers: Sequence[int]) -> dict[str, str]:
        """See ModelConfig; a layer whose source is left out has keys of its own."""
        sources = [self.kv_source(layer) for layer in layers]
        numbers = [layers.index(n) if n in layers else own for own, n in enumerate(sources)]
        text = ",".join(map(str, numbers))
        more = {} if self.layer_kv_sources is None else {"layer_kv_sources": text}
        return super().selected(layers) | more

    def kv_source(self, layer: int) -> int:
        """The layer whose keys and values a layer attends to."""
        return layer if self.layer_kv_sources is None else self._kv_sources[layer]

    @property
    def _kv_sources(self) -> list[int]:
        return [*map(int, (self.layer_kv_sources or "").split(","))]

    def has_keys(self, layer: int) -> bool:
        """Return whether a layer makes keys and values."""
        return self.kv_source(layer) == layer

    def shares_keys(self, layer: int) -> bool:
        """Return whether a layer attends to those of another."""
        return not self.has_keys(layer)

    def normalizes_keys(self, layer: int) -> bool:
        """Return whether a layer has a norm of keys, if the model has."""
        return self.has_keys(layer) and self.normalizes_heads(layer)

    def sparsity(self, layer: int) -> float:
        """Return the share of a gate's numbers that are dropped."""
        return float(self.layer_sparsities.split(",")[layer]) if self.layer_sparsities else 0.0

    def stream_tp_number(self) -> int:
        """A number that the tensor-parallel sizes divide; 0 where any size does."""
        return gcd(self.layer_input_size or 0, self.laurel_rank or 0)

    def check_streams(self, problems: Problems, parts: Any) -> None:
        """Note what cannot be."""
        for name in ("layer_input_size", "laurel_rank", "num_streams"):
            if getattr(self, name) is not None:
                problems.check_minimum(name, getattr(self, name), 1)
        sources = numbers_in(problems, "layer_kv_sources", self.layer_kv_sources, int)
        if sources and (
            len(sources) != self.num_layers
            or any(not 0 <= source <= layer for layer, source in enumerate(sources))
            or any(sources[source] != source for source in sources)
        ):
            problems.add(
                "layer_kv_sources must name for each layer itself, or an earlier one with keys",
                got=self.layer_kv_sources,
            )
        elif sources and any(
            self.window(layer) != self.window(source)
            or self.of_layer(layer).local_size("kv_size", 1)
            != self.of_layer(source).local_size("kv_size", 1)
            for layer, source in enumerate(sources)
        ):
            problems.add("layers that share keys differ in windows or sizes", got=sources)
        shares = numbers_in(problems, "layer_sparsities", self.layer_sparsities, float)
        if shares and not (len(shares) == self.num_layers and all(0 <= n < 1 for n in shares)):
            text = "layer_sparsities must be a number from 0 to below 1 for each layer"
            problems.add(text, got=self.layer_sparsities)
        if self.num_streams is not None and (
            not 0 <= (self.active_stream or 0) < self.num_streams or not self.layer_input_size
        ):
            problems.add("num_streams needs layer_input_size, and an active_stream of them")
        if not (self.layer_input_size or self.layer_kv_sources or self.laurel_rank):
            return
        if self.layer_branches is not None or self.parallel_residual:
            problems.add("inputs of layers and shared keys need attention, and then an MLP")
        if parts.ia3_num_tasks or parts.adapter_size or parts.prompt_tasks:
            problems.add("virtual tokens, IA3 and adapters of such layers are not supported")
        mlps = [stem for stem in parts.lora_targets if stem.startswith("mlp.")]
        if self.layer_sparsities and mlps:
            problems.add("LoRA of MLPs that drop numbers can only be merged", got=mlps)


def weights(config: StreamSizes, linear: Linears, norm: Any, spec: Any) -> list[WeightSpec]:
    """Rows of weights, of every layer and of all together."""
    columns, rows = Partition.COLUMN_PARALLEL, Partition.ROW_PARALLEL
    result: list[WeightSpec] = []
    hidden, size = "hidden_size", "layer_input_size"
    if config.layer_input_size:
        stem = "layers.*.layer_input"
        result.append(spec(f"{stem}.table", ("vocab_size", size), columns))
        result += linear(f"{stem}.projection", (hidden, size), Partition.REPLICATED, bias=False)
        result += norm(config, f"{stem}.norm", size)
        result += linear(f"{stem}.gate", (hidden, size), columns, bias=False)
        result += linear(f"{stem}.out", (size, hidden), rows, bias=False)
        result += norm(config, f"{stem}.output_norm")
    if config.laurel_rank:
        stem = "layers.*.laurel"
        result += linear(f"{stem}.down", (hidden, "laurel_rank"), columns, bias=False)
        result += linear(f"{stem}.up", ("laurel_rank", hidden), rows, bias=False)
        result += norm(config, f"{stem}.output_norm")
    if config.num_streams:
        stem, count = "layers.*.streams", "num_streams"
        result += norm(config, f"{stem}.norm")
        result.append(spec(f"{stem}.router.weight", (hidden, count)))
        result.append(spec(f"{stem}.prediction.weight", (count, "stream_coefficients")))
        result.append(spec(f"{stem}.correction.weight", (count, count)))
        result.append(spec(f"{stem}.scale", (hidden,)))
        for stream in range(config.num_streams - 1):
            for name in ("in", "out"):
                result.append(spec(f"streams.{stream}.{name}.weight", (hidden, hidden)))
    return result


_MLP = "layers.*.mlp"
GEMMA4 = {
    "layers.*.scale": Source(("layers.*.layer_scalar",)),
    "layers.*.attention.query": Source(("layers.*.self_attn.q_proj",), "transposed"),
    "layers.*.layer_input.table": Source(("layers.*.per_layer_table",)),
    "layers.*.layer_input.projection": Source(
        ("layers.*.per_layer_model_projection",), "transposed"
    ),
    "layers.*.layer_input.norm": Source(("layers.*.per_layer_projection_norm",)),
    "layers.*.layer_input.gate": Source(("layers.*.per_layer_input_gate",), "transposed"),
    "layers.*.layer_input.out": Source(("layers.*.per_layer_projection",), "transposed"),
    "layers.*.layer_input.output_norm": Source(("layers.*.post_per_layer_input_norm",)),
    f"{_MLP}.router": Source(("layers.*.router.proj",), "transposed"),
    f"{_MLP}.router.norm.weight": Source(("layers.*.router.scale",)),
    f"{_MLP}.router.expert_scale": Source(("layers.*.router.per_expert_scale",)),
    f"{_MLP}.expert_norm": Source(("layers.*.pre_feedforward_layernorm_2",)),
    f"{_MLP}.expert_output_norm": Source(("layers.*.post_feedforward_layernorm_2",)),
    f"{_MLP}.shared_output_norm": Source(("layers.*.post_feedforward_layernorm_1",)),
    **{
        f"{_MLP}.{served}.{name}": Source((f"layers.*.{stem}.{key}",), "transposed")
        for served, stem in (("experts.#", "experts.#"), ("shared_expert", "mlp"))
        for name, key in (
            ("dense_h_to_4h", "gate_proj"),
            ("dense_h_to_4h_2", "up_proj"),
            ("dense_4h_to_h", "down_proj"),
        )
    },
}
# Of files that have both halves of an expert in one tensor.
GEMMA4_JOINED = {
    f"{_MLP}.experts.#.{name}": Source(("layers.*.experts.#.gate_up_proj",), f"{half}_half")
    for name, half in (("dense_h_to_4h", "first"), ("dense_h_to_4h_2", "second"))
}
_ALTUP = "layers.*.altup"
GEMMA3N = GEMMA4 | {
    "layers.*.laurel.down": Source(("layers.*.laurel.linear_left",), "transposed"),
    "layers.*.laurel.up": Source(("layers.*.laurel.linear_right",), "transposed"),
    "layers.*.laurel.output_norm": Source(("layers.*.laurel.post_laurel_norm",)),
    "layers.*.streams.norm": Source((f"{_ALTUP}.router_norm",)),
    "layers.*.streams.router": Source((f"{_ALTUP}.modality_router",), "transposed"),
    "layers.*.streams.prediction": Source((f"{_ALTUP}.prediction_coefs",), "transposed"),
    "layers.*.streams.correction": Source((f"{_ALTUP}.correction_coefs",), "transposed"),
    "layers.*.streams.scale": Source((f"{_ALTUP}.correct_output_scale",)),
    **{
        f"streams.{stream}.{name}": Source((f"{key}.{stream}",), "transposed")
        for stream in range(16)
        for name, key in (("in", "altup_projections"), ("out", "altup_unembed_projections"))
    },
}
DIALECTS = {"gemma4": GEMMA4, "gemma4_joined": GEMMA4_JOINED, "gemma3n": GEMMA3N}
