"""More than a hundred faults, each planted into an export, and the certificates that they get.

    python3 -m tests.evaluation.planted_faults [FAMILY ...]    prints what was found and located

A hidden fault is one that the reader of the checkpoint has, too: comparing tensors and settings by
their names shows nothing then, and the layers must.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.evaluation import twins
from tests.evaluation.planting import (
    Bench,
    Cold,
    Forgetful,
    Noisy,
    Planted,
    Quantized,
    bf16,
    exchanged,
    head_transposed,
    is_found,
    is_located,
    keys_and_queries,
    keys_and_values,
    noise,
    one_column,
    paired,
    rolled_heads,
    setting,
    template,
    tensor,
    tokenizer,
)

MIN_FOUND, MIN_LOCATED = 0.95, 0.80
NORM = ("norm", "attention_norm", "mlp_norm", "head_norm")
QKV, MLP = ("query_key_value",), ("mlp_input",)


def _decoder_rows(family: str, stem: str) -> list[Planted]:
    """Faults that every gated decoder here can have, in its layer 1."""
    layer, dense = "model.layers.1.{}", (24, 16) if family == "qwen3" else (16, 16)
    width = {"qwen3": 48, "llama": 32, "mixtral": 32}[family]
    qkv, out = (
        layer.format("attention.query_key_value.weight"),
        layer.format("attention.dense.weight"),
    )
    up, gate = (
        layer.format(f"mlp.{stem}{name}.weight") for name in ("dense_h_to_4h", "dense_h_to_4h_2")
    )
    down = layer.format(f"mlp.{stem}dense_4h_to_h.weight")
    first, second = (
        layer.format(f"{name}_layernorm.weight") for name in ("input", "post_attention")
    )
    inputs = (*MLP, "experts") if stem else MLP
    outputs = ("mlp_output", "experts") if stem else ("mlp_output",)
    rows = [
        ("queries' heads rolled", tensor(qkv, rolled_heads, (16, width)), QKV),
        (
            "keys for values",
            tensor(qkv, lambda v: np.ascontiguousarray(v[:, ::-1]), (16, width)),
            QKV,
        ),
        ("a column of the queries", tensor(qkv, one_column, (16, width)), QKV),
        ("a transposed head", tensor(qkv, head_transposed, (16, width)), QKV),
        ("gate and up exchanged", exchanged(up, gate), inputs),
        ("down of the other sign", tensor(down, lambda v: -v), outputs),
        ("attention's output doubled", tensor(out, lambda v: 2 * v), ("attention_output",)),
        ("noise in the output", tensor(out, noise, dense), ("attention_output",)),
        ("norms exchanged", exchanged(first, second), NORM),
        ("norm plus one", tensor(first, lambda v: v + 1), NORM),
    ]
    planted = []
    for number, (name, plant, parts) in enumerate(rows):
        hidden = number % 2 == (family == "llama")
        planted.append(Planted(family, name, plant, parts, 1, hidden))
    return planted


def _settings(family: str, rows: Sequence[tuple[str, Any, tuple[str, ...]]]) -> list[Planted]:
    return [
        Planted(family, f"{name} {value}", setting(name, value), parts, hidden=hidden)
        for name, value, parts in rows
        for hidden in (False, True)
    ]


def _vocab(content: dict[str, Any]) -> dict[str, int]:
    vocab: dict[str, int] = content["model"]["vocab"]
    return vocab


def _swap(content: dict[str, Any], one: str = "a", other: str = "e") -> None:
    vocab = _vocab(content)
    vocab[one], vocab[other] = vocab[other], vocab[one]


def _dropped(content: dict[str, Any], count: int) -> None:
    merges = content["model"]["merges"]
    for pair in merges[-count:]:
        left, right = pair if isinstance(pair, list) else pair.split(" ")
        _vocab(content).pop(left + right, None)
    del merges[-count:]


TOKENIZERS: dict[str, Callable[[dict[str, Any]], None]] = {
    "two tokens exchanged": _swap,
    "two rare tokens exchanged": lambda c: _swap(c, "q", "z"),
    "a dropped token": lambda c: _dropped(c, 1),
    "ten dropped tokens": lambda c: _dropped(c, 10),
    "merges in another order": lambda c: c["model"]["merges"].reverse(),
    "no opening token": lambda c: c.update(post_processor=None),
    "lower case": lambda c: c.update(normalizer={"type": "Lowercase"}),
    "composed accents": lambda c: c.update(normalizer={"type": "NFKC"}),
    "a space before texts": lambda c: c["pre_tokenizer"].update(add_prefix_space=True),
    "an added token more": lambda c: c["added_tokens"].append(
        {
            **c["added_tokens"][0],
            "id": _vocab(c).get("the", 5),
            "content": "sea",
        }
    ),
}
FAULTS: list[Planted] = [
    *_decoder_rows("llama", ""),
    *_decoder_rows("qwen3", ""),
    *_decoder_rows("mixtral", "experts.2."),
    Planted(
        "llama",
        "the other rotary layout",
        tensor("model.layers.0.attention.query_key_value.weight", paired, (16, 32)),
        ("positions", *QKV, "attention"),
        0,
        True,
    ),
    Planted(
        "llama",
        "layers exchanged",
        exchanged("model.layers.0.mlp.dense_4h_to_h", "model.layers.1.mlp.dense_4h_to_h"),
        ("mlp_output",),
        0,
    ),
    Planted(
        "llama",
        "layers exchanged, hidden",
        exchanged("model.layers.0.mlp.dense_4h_to_h", "model.layers.1.mlp.dense_4h_to_h"),
        ("mlp_output",),
        0,
        True,
    ),
    Planted("llama", "head doubled", tensor("model.lm_head.weight", lambda v: 2 * v), ("head",)),
    Planted(
        "llama",
        "head scaled, hidden",
        tensor("model.lm_head.weight", lambda v: 0.7 * v),
        ("head",),
        None,
        True,
    ),
    Planted(
        "llama", "rows of the table", tensor("model.wte", lambda v: np.roll(v, 16)), ("embedding",)
    ),
    Planted(
        "llama",
        "rows of the table, hidden",
        tensor("model.wte", lambda v: np.roll(v, 16)),
        ("embedding",),
        None,
        True,
    ),
    Planted(
        "llama",
        "final norm",
        tensor("model.final_layernorm.weight", lambda v: v[::-1]),
        ("final_norm",),
    ),
    Planted(
        "llama",
        "final norm, hidden",
        tensor("model.final_layernorm.weight", lambda v: v[::-1]),
        ("final_norm",),
        None,
        True,
    ),
    Planted(
        "llama",
        "rounded weights",
        tensor("model.layers.0.mlp.dense_4h_to_h", bf16),
        ("mlp_output",),
        0,
    ),
    *_settings(
        "llama",
        [
            ("layernorm_eps", 0.01, NORM),
            ("rotary_base", 20000.0, ("positions",)),
            ("rotary_scaling_factor", 4.0, ("positions",)),
            ("rotary_percentage", 0.5, ("positions",)),
        ],
    ),
    Planted("llama", "a tiny eps", setting("layernorm_eps", 1e-12), NORM),
    *_settings(
        "qwen3",
        [
            ("sliding_window", 5, ("attention",)),
            ("sliding_window", 7, ("attention",)),
            ("full_attention_layers", "2,3", ("attention",)),
            ("rotary_base", 100000.0, ("positions",)),
        ],
    ),
    *_settings(
        "mixtral",
        [
            ("experts_per_token", 1, ("router", "experts")),
            ("normalized_experts", False, ("router", "experts")),
        ],
    ),
    Planted(
        "mixtral",
        "router's experts",
        tensor("model.layers.0.mlp.router.weight", lambda v: np.roll(v, 1, 1), (16, 4)),
        ("router",),
        0,
    ),
    Planted(
        "mixtral",
        "router's experts, hidden",
        tensor("model.layers.0.mlp.router.weight", lambda v: np.roll(v, 1, 1), (16, 4)),
        ("router", "experts"),
        0,
        True,
    ),
    Planted(
        "mixtral",
        "experts exchanged",
        exchanged(
            "model.layers.1.mlp.experts.0.dense_4h_to_h",
            "model.layers.1.mlp.experts.3.dense_4h_to_h",
        ),
        ("mlp_output", "experts"),
        1,
    ),
    *(
        Planted("gpt2", name, tensor(stem, made, shape), parts, layer, hidden)
        for name, stem, made, shape, parts, layer, hidden in (
            (
                "no bias of a norm",
                "model.layers.1.input_layernorm.bias",
                np.zeros_like,
                None,
                NORM,
                1,
                False,
            ),
            (
                "no bias of a norm, hidden",
                "model.layers.1.input_layernorm.bias",
                np.zeros_like,
                None,
                NORM,
                1,
                True,
            ),
            (
                "no bias of the queries",
                "model.layers.0.attention.query_key_value.bias",
                np.zeros_like,
                None,
                QKV,
                0,
                True,
            ),
            (
                "no bias of down",
                "model.layers.0.mlp.dense_4h_to_h.bias",
                np.zeros_like,
                None,
                ("mlp_output",),
                0,
                False,
            ),
            (
                "no bias of up, hidden",
                "model.layers.1.mlp.dense_h_to_4h.bias",
                np.zeros_like,
                None,
                MLP,
                1,
                True,
            ),
            (
                "output transposed",
                "model.layers.0.attention.dense.weight",
                np.transpose,
                (16, 16),
                ("attention_output",),
                0,
                False,
            ),
            (
                "output transposed, hidden",
                "model.layers.0.attention.dense.weight",
                np.transpose,
                (16, 16),
                ("attention_output",),
                0,
                True,
            ),
            (
                "queries for keys",
                "model.layers.1.attention.query_key_value.weight",
                keys_and_queries,
                (16, 48),
                QKV,
                1,
                True,
            ),
            (
                "keys for values",
                "model.layers.1.attention.query_key_value.weight",
                keys_and_values,
                (16, 48),
                QKV,
                1,
                True,
            ),
            (
                "positions off by one",
                "model.wpe",
                lambda v: np.roll(v, -16),
                None,
                ("positions",),
                None,
                False,
            ),
            (
                "positions off by one, hidden",
                "model.wpe",
                lambda v: np.roll(v, -16),
                None,
                ("embedding", "positions"),
                None,
                True,
            ),
        )
    ),
    *_settings(
        "gpt2",
        [
            ("activation", "gelu_erf", MLP),
            ("activation", "relu", MLP),
            ("layernorm_eps", 0.01, NORM),
        ],
    ),
    *(
        Planted("t5", name, plant, parts, layer, hidden)
        for name, plant, parts, layer, hidden in (
            (
                "gate and up exchanged",
                exchanged(
                    "encoder.block.1.layer.1.DenseReluDense.wi.",
                    "encoder.block.1.layer.1.DenseReluDense.wi2.",
                ),
                MLP,
                1,
                False,
            ),
            (
                "gate and up exchanged, hidden",
                exchanged(
                    "decoder.block.1.layer.2.DenseReluDense.wi.",
                    "decoder.block.1.layer.2.DenseReluDense.wi2.",
                ),
                MLP,
                1,
                True,
            ),
            (
                "the bias of distances",
                tensor("encoder.block.0.layer.0.SelfAttention.relative", lambda v: v[::-1]),
                ("positions",),
                None,
                False,
            ),
            (
                "cross keys doubled",
                tensor("decoder.block.2.layer.1.EncDecAttention.k", lambda v: 2 * v),
                ("cross_attention",),
                2,
                False,
            ),
            (
                "cross keys doubled, hidden",
                tensor("decoder.block.2.layer.1.EncDecAttention.k", lambda v: 2 * v),
                ("cross_attention",),
                2,
                True,
            ),
            (
                "the encoder's norm",
                tensor("encoder.final_layer_norm", lambda v: 1.5 * v),
                ("final_norm", "encoder_norm"),
                None,
                False,
            ),
            (
                "the encoder's norm, hidden",
                tensor("encoder.final_layer_norm", lambda v: 1.5 * v),
                ("final_norm", "encoder_norm"),
                None,
                True,
            ),
        )
    ),
    *_settings(
        "t5",
        [
            ("attention_scale", 0.5, ("attention",)),
            ("max_distance", 128, ("positions", "attention")),
        ],
    ),
    *(
        Planted("llama", f"tokenizer: {name}", tokenizer(change), ("tokenizer",))
        for name, change in TOKENIZERS.items()
    ),
    Planted(
        "llama", "another chat template", template("{{ messages[0].content }}"), ("chat_template",)
    ),
    Planted("llama", "no chat template", template(None), ("chat_template",)),
    Planted("llama", "a server with a temperature", None, ("server",), client=Cold),
    Planted("llama", "a server that is not exact", None, ("server",), client=Noisy),
    Planted("llama", "a server that quantizes", None, ("server",), client=Quantized),
    Planted(
        "llama", "a server that opens prompts", None, ("tokenizer",), client=twins.OpensPrompts
    ),
    Planted(
        "llama", "a server that drops openings", None, ("tokenizer",), client=twins.DropsOpenings
    ),
    Planted("llama", "a server that forgets a token", None, ("server",), client=Forgetful),
]


def main(families: Sequence[str]) -> int:
    selected = [fault for fault in FAULTS if not families or fault.family in families]
    found, located, alarms = [], [], []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        bench = Bench(Path(folder))
        for family in {fault.family: None for fault in selected}:
            for data_type in ("fp32", "bf16"):
                content = bench.certificate(Planted(family, "clean", None, ()), data_type)
                alarms += [] if content["statement"] == "equivalent" else [(family, data_type)]
                print(
                    f"CLEAN {family} {data_type}: {content['statement']} {content['faults']}",
                    flush=True,
                )
        for fault in selected:
            try:
                content = bench.certificate(fault)
            except Exception as error:
                print(
                    f"ERROR {fault.family} {fault.name}: {type(error).__name__}: {error}",
                    flush=True,
                )
                continue
            found += [fault] if is_found(content) else []
            located += [fault] if is_located(fault, content) else []
            word = (
                "located"
                if is_located(fault, content)
                else "found"
                if is_found(content)
                else "MISSED"
            )
            first = content["faults"][0] if content["faults"] else {"part": "-", "kind": "-"}
            kind = " hidden" if fault.hidden else ""
            print(
                f"FAULT {word:8} {fault.family} {fault.name}{kind}: {first['part']} "
                f"{first.get('layer')} {first['kind']} (planted: {fault.parts} {fault.layer})",
                flush=True,
            )
    count = len(selected)
    print(
        f"TOTAL {count} faults: {len(found)} found, {len(located)} located; "
        f"{len(alarms)} false alarms"
    )
    good = len(found) >= MIN_FOUND * count and len(located) >= MIN_LOCATED * count and not alarms
    return int(not good)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
