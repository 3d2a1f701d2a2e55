"""Adapters of Hugging Face PEFT, merged into bases of several formats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from launcher_scripts.models.family import Source
from launcher_scripts.models.gpt_dialects import DIALECTS
from tests.checkpoint.exporting import export_folder, open_weights, refused_export
from tests.checkpoint.peft_maker import STEM, PeftMaker
from tests.checkpoint.reference_forward_gpt import logits
from tests.checkpoint.reference_weights import StoredWeights
from tests.checkpoint.test_gguf import write as write_gguf
from tests.checkpoint.tiny_models import GPT2, LATER_DECODERS, LLAMA, OPT, T5, T5GEMMA2, TinyModel

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
QWEN2 = {**LLAMA, "tie_word_embeddings": False}
MODELS = {
    "llama": TinyModel("LlamaForCausalLM", "LlamaConfig", {**LLAMA, "tie_word_embeddings": False}),
    "tied": TinyModel("LlamaForCausalLM", "LlamaConfig", {**LLAMA, "tie_word_embeddings": True}),
    "qwen2": TinyModel("Qwen2ForCausalLM", "Qwen2Config", QWEN2),
    "gpt2": TinyModel("GPT2LMHeadModel", "GPT2Config", GPT2),
    "opt": TinyModel("OPTForCausalLM", "OPTConfig", OPT),
    "t5": TinyModel("T5ForConditionalGeneration", "T5Config", T5),
    "t5gemma2": T5GEMMA2,
}
# What the plain forward pass of the tests does not know.
LATER = ("gemma2", "phi3", "falcon_40b", "gptj", "qwen2_moe")
WITHOUT_LOGITS = (*LATER, "t5", "t5gemma2")
MODELS |= {name: LATER_DECODERS[name] for name in LATER}
EMBED = "model.embed_tokens"
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def layers(*endings: str, **more: Any) -> Callable[[PeftMaker], None]:
    """LoRA of every module that ends so."""

    def make(maker: PeftMaker) -> None:
        for module in maker.modules(*endings):
            maker.lora(module, 2.0, **more)

    return make


def _patterns(maker: PeftMaker) -> None:
    for module in maker.modules("q_proj", "up_proj", "down_proj"):
        rank = 6 if module == "model.layers.1.mlp.up_proj" else 2 if "q_proj" in module else 4
        alpha = 3 if "down_proj" in module else 8
        maker.lora(module, alpha / rank, rank)


def _saved(maker: PeftMaker) -> None:
    for name in (f"{EMBED}.weight", "lm_head.weight", "model.norm.weight"):
        maker.full(name)
    layers("q_proj")(maker)


def _tokens(maker: PeftMaker) -> None:
    maker.tokens(EMBED, [3, 1, 60])
    layers("v_proj")(maker)


def _tables(maker: PeftMaker) -> None:
    """PEFT stores the table, too, that LoRA was learned for."""
    maker.full(f"{EMBED}.weight", f"{EMBED}.base_layer.weight")
    maker.embedding(EMBED, 2.0)
    maker.lora("lm_head", 2.0)


def _biases(stored: str) -> Callable[[PeftMaker], None]:
    def make(maker: PeftMaker) -> None:
        for module in maker.modules("q_proj", "v_proj"):
            maker.lora(module, 2.0)
            maker.full(f"{module}.bias", f"{module}{stored}.bias")

    return make


def _added_bias(maker: PeftMaker) -> None:
    for module in maker.modules("q_proj"):
        maker.lora(module, 2.0)
        maker.lora_bias(module, 2.0)


# name -> model, what was learned, adapter_config.json
CASES: dict[str, tuple[str, Callable[[PeftMaker], None], dict[str, Any]]] = {
    "all": ("llama", layers(*LINEAR), {"target_modules": "all-linear"}),
    "rslora": (
        "llama",
        layers("q_proj", "v_proj", rank=16),
        {"target_modules": ["q_proj", "v_proj"], "use_rslora": True, "r": 16},
    ),
    "pattern": (
        "llama",
        layers("0.self_attn.k_proj", "0.mlp.up_proj"),
        {"target_modules": r".*\.layers\.0\.(self_attn\.k_proj|mlp\.up_proj)"},
    ),
    "layers": (
        "llama",
        layers("1.self_attn.v_proj", "1.mlp.down_proj"),
        {"target_modules": ["v_proj", "down_proj"], "layers_to_transform": [1]},
    ),
    "named_layers": (
        "llama",
        layers("0.self_attn.v_proj"),
        {"target_modules": ["v_proj"], "layers_to_transform": 0, "layers_pattern": "layers"},
    ),
    "excluded": (
        "llama",
        layers("0.mlp.up_proj"),
        {"target_modules": ["up_proj"], "exclude_modules": ["layers.1.mlp.up_proj"]},
    ),
    "patterns": (
        "llama",
        _patterns,
        {
            "target_modules": ["q_proj", "up_proj", "down_proj"],
            "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 6},
            "alpha_pattern": {"down_proj": 3},
        },
    ),
    "dora": (
        "llama",
        layers("q_proj", "v_proj", "down_proj", dora=True),
        {"target_modules": ["q_proj", "v_proj", "down_proj"], "use_dora": True},
    ),
    "saved": (
        "llama",
        _saved,
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head", "norm"]},
    ),
    "tokens": (
        "llama",
        _tokens,
        {"target_modules": ["v_proj"], "trainable_token_indices": [3, 1, 60]},
    ),
    "named_tokens": (
        "llama",
        _tokens,
        {"target_modules": ["v_proj"], "trainable_token_indices": {"embed_tokens": [3, 1, 60]}},
    ),
    "tables": ("llama", _tables, {"target_modules": ["embed_tokens", "lm_head"]}),
    "tied_tokens": (
        "tied",
        lambda maker: maker.tokens(EMBED, [7, 8]),
        {"target_modules": [], "trainable_token_indices": [7, 8]},
    ),
    "biases": (
        "qwen2",
        _biases(".base_layer"),
        {"target_modules": ["q_proj", "v_proj"], "bias": "lora_only"},
    ),
    "all_biases": ("qwen2", _biases(""), {"target_modules": ["q_proj", "v_proj"], "bias": "all"}),
    "added_bias": ("qwen2", _added_bias, {"target_modules": ["q_proj"], "lora_bias": True}),
    "gpt2": (
        "gpt2",
        layers("c_attn", "attn.c_proj", "c_fc", conv=True, dora=True),
        {
            "target_modules": ["c_attn", "attn.c_proj", "c_fc"],
            "fan_in_fan_out": True,
            "use_dora": True,
        },
    ),
    "opt": ("opt", layers("q_proj", "fc1"), {"target_modules": ["q_proj", "fc1"]}),
    "gemma2": ("gemma2", layers(*LINEAR), {"target_modules": "all-linear"}),
    "phi3": (
        "phi3",
        layers("qkv_proj", "gate_up_proj", dora=True),
        {"target_modules": ["qkv_proj", "gate_up_proj"], "use_dora": True},
    ),
    "falcon": (
        "falcon_40b",
        layers("query_key_value", dora=True),
        {"target_modules": ["query_key_value"], "use_dora": True},
    ),
    "gptj": ("gptj", layers("q_proj", "fc_in"), {"target_modules": ["q_proj", "fc_in"]}),
    "qwen2_moe": (
        "qwen2_moe",
        layers("q_proj", "shared_expert.up_proj"),
        {"target_modules": ["q_proj", "shared_expert.up_proj"]},
    ),
    "t5": ("t5", layers(".q", ".v", ".wo"), {"target_modules": ["q", "v", "wo"]}),
    "t5gemma2": (
        "t5gemma2",
        layers("text_model.layers.0.self_attn.q_proj", "decoder.layers.1.self_attn.k_proj"),
        {
            "target_modules": [
                "text_model.layers.0.self_attn.q_proj",
                "decoder.layers.1.self_attn.k_proj",
            ]
        },
    ),
}


def save(model: PreTrainedModel, folder: Path, state: dict[str, torch.Tensor]) -> Path:
    """The model with another state dict; a tied one's table follows the embeddings."""
    state = dict(state)
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    model.load_state_dict(state, strict=False)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("base")
    return folder, MODELS["llama"].save(folder)


def check_merged(
    tmp_path: Path, tiny: TinyModel, make: Callable[[PeftMaker], None], **config: Any
) -> tuple[PreTrainedModel, StoredWeights, Any]:
    """Compare an export of a base with what was learned for it to one of the merged model."""
    model = tiny.save(tmp_path / "base")
    maker = PeftMaker(model)
    make(maker)
    adapter = maker.write(tmp_path / "adapter", **config)
    folder = export_folder(tmp_path / "base", tmp_path / "a", 2, adapter_checkpoints=(adapter,))
    merged = save(model, tmp_path / "merged", maker.merged)
    expected, _ = open_weights(export_folder(merged, tmp_path / "b"))
    found, exported = open_weights(folder)
    for row in expected.rows:
        torch.testing.assert_close(found[row], expected[row], rtol=1e-6, atol=2e-6)
    return model, found, exported


@pytest.mark.parametrize("name", CASES)
def test_the_merged_model_is_what_its_formula_says(tmp_path: Path, name: str) -> None:
    kind, make, config = CASES[name]
    model, found, exported = check_merged(
        tmp_path, MODELS[kind], make, binary=name == "all", **config
    )
    if kind not in WITHOUT_LOGITS:
        with torch.no_grad():
            wanted = model(IDS).logits
        torch.testing.assert_close(logits(found, exported, IDS), wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_an_adapter_that_peft_wrote(data_dir: Path, tmp_path: Path, tp_size: int) -> None:
    source = data_dir / "peft_llama"
    adapter = str(source / "adapter")
    folder = export_folder(source / "base", tmp_path, tp_size, adapter_checkpoints=(adapter,))
    with np.load(source / "reference.npz") as reference:
        found = logits(*open_weights(folder), torch.from_numpy(reference["tokens"]))
        assert np.abs(found.numpy() - reference["logits"]).max() <= 1e-5


def _update(maker: PeftMaker, name: str) -> torch.Tensor:
    """What LoRA of a linear layer adds to it, [in, out]."""
    if f"{STEM}{name}.lora_A.weight" not in maker.tensors:
        return torch.zeros_like(maker.merged[f"{name}.weight"]).T
    down, up = (maker.tensors[f"{STEM}{name}.lora_{side}.weight"] for side in "AB")
    return 2.0 * (up @ down).T


@pytest.mark.parametrize("dtype", ["F32", "Q8_0"])
def test_a_base_in_gguf(tmp_path: Path, dtype: str) -> None:
    sizes = {**LLAMA, "hidden_size": 32, "intermediate_size": 64, "tie_word_embeddings": False}
    model = TinyModel("LlamaForCausalLM", "LlamaConfig", sizes).make()
    write_gguf(model, tmp_path / "m.gguf", gguf.GGMLQuantizationType[dtype])
    maker = PeftMaker(model)
    layers(*LINEAR)(maker)
    adapter = maker.write(tmp_path / "adapter", target_modules="all-linear")
    _check_other_base(tmp_path / "m.gguf", tmp_path, maker, adapter)


@pytest.mark.parametrize("names", [LINEAR, ("up_proj",), ("q_proj", "down_proj")])
def test_a_base_of_megatron_core(data_dir: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    """The same adapter on a Llama whose query, key, value, gate and up are fused."""
    values = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64}
    sizes = {**LLAMA, **values, "tie_word_embeddings": False}
    maker = PeftMaker(TinyModel("LlamaForCausalLM", "LlamaConfig", sizes).make())
    layers(*names)(maker)
    adapter = maker.write(tmp_path / "adapter", target_modules=list(names))
    base = data_dir / "core" / "bridge031_llama31_a" / "checkpoint"
    _check_other_base(base, tmp_path, maker, adapter)


def test_names_that_two_families_lay_out_differently(data_dir, tmp_path, monkeypatch) -> None:
    """XGLM and Llama agree on q_proj, until one of them has it elsewhere."""
    base = data_dir / "core" / "bridge031_llama31_a" / "checkpoint"
    sizes = {**LLAMA, "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64}
    maker = PeftMaker(TinyModel("LlamaForCausalLM", "LlamaConfig", sizes).make())
    layers("q_proj")(maker)
    adapter = maker.write(tmp_path / "adapter")
    export_folder(base, tmp_path / "a", adapter_checkpoints=(adapter,))
    swapped = tuple(f"layers.*.self_attn.{part}_proj.weight" for part in "kqv")
    row = {"layers.*.attention.query_key_value.weight": Source(swapped, "heads_side_by_side")}
    monkeypatch.setitem(DIALECTS, "xglm", DIALECTS["xglm"] | row)
    refused_export(
        base, tmp_path, "laid out differently in several families", adapter_checkpoints=(adapter,)
    )


def _check_other_base(base: Path, tmp_path: Path, maker: PeftMaker, adapter: str) -> None:
    plain, _ = open_weights(export_folder(base, tmp_path / "a"))
    found, _ = open_weights(export_folder(base, tmp_path / "b", 2, adapter_checkpoints=(adapter,)))
    for layer in range(2):
        stem = f"model.layers.{layer}"
        qkv = [_update(maker, f"{stem}.self_attn.{part}_proj") for part in "qkv"]
        for name, update in (
            ("attention.query_key_value", torch.cat(qkv, dim=1)),
            ("attention.dense", _update(maker, f"{stem}.self_attn.o_proj")),
            ("mlp.dense_h_to_4h", _update(maker, f"{stem}.mlp.gate_proj")),
            ("mlp.dense_h_to_4h_2", _update(maker, f"{stem}.mlp.up_proj")),
            ("mlp.dense_4h_to_h", _update(maker, f"{stem}.mlp.down_proj")),
        ):
            row = f"layers.{layer}.{name}.weight"
            torch.testing.assert_close(found[row], plain[row] + update, rtol=0, atol=2e-6)


def test_a_bfloat16_base_is_merged_in_float32_and_rounded_once(tmp_path: Path) -> None:
    model = MODELS["llama"].make().to(torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    maker = PeftMaker(model.float())
    layers("down_proj")(maker)
    adapter = maker.write(tmp_path / "adapter", target_modules=["down_proj"])
    folder = export_folder(
        tmp_path / "base", tmp_path / "a", 1, "bf16", adapter_checkpoints=(adapter,)
    )
    found, _ = open_weights(folder)
    expected = maker.merged["model.layers.1.mlp.down_proj.weight"].T.to(torch.bfloat16)
    assert torch.equal(found["layers.1.mlp.dense_4h_to_h.weight"], expected.float())


def test_adapters_are_merged_one_after_another(tmp_path: Path) -> None:
    model = MODELS["llama"].save(tmp_path / "base")
    makers = [PeftMaker(model, seed) for seed in (1, 2)]
    paths = []
    for number, maker in enumerate(makers):
        layers("o_proj")(maker)
        folder = tmp_path / f"adapter{number}"
        paths.append(maker.write(folder, target_modules=["o_proj"]))
    plain, _ = open_weights(export_folder(tmp_path / "base", tmp_path / "a"))
    both = export_folder(tmp_path / "base", tmp_path / "b", adapter_checkpoints=tuple(paths))
    found, _ = open_weights(both)
    updates = sum(_update(maker, "model.layers.1.self_attn.o_proj") for maker in makers)
    row = "layers.1.attention.dense.weight"
    torch.testing.assert_close(found[row], plain[row] + updates, rtol=0, atol=2e-6)


def test_equal_tables_of_a_tied_base_stay_one(tmp_path: Path) -> None:
    model = MODELS["tied"].save(tmp_path / "base")
    maker = PeftMaker(model)
    maker.full(f"{EMBED}.weight")
    table = maker.tensors[f"{STEM}{EMBED}.weight"]
    maker.tensors[f"{STEM}lm_head.weight"] = table.clone()
    config = {"target_modules": [], "modules_to_save": ["embed_tokens", "lm_head"]}
    adapter = maker.write(tmp_path / "adapter", **config)
    folder = export_folder(tmp_path / "base", tmp_path / "a", adapter_checkpoints=(adapter,))
    found, exported = open_weights(folder)
    assert exported.tied_embeddings
    assert torch.equal(found["wte"], table)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is not supported; got 'IA3'; choices: LORA"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is not supported; got 'pissa'"),
        ({"layer_replication": [[0, 1]]}, r"layer_replication is not supported; got \[\[0, 1\]\]"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is not supported"),
        ({"target_parameters": ["x"]}, "target_parameters names x: LoRA of it is not in the file"),
        ({"target_parameters": "x"}, "target_parameters must be a list of names; got 'x'"),
        ({"kasa_config": {"beta": 1}}, "kasa_config is not supported"),
        ({"of_tomorrow": 1}, "of_tomorrow is not supported; got 1"),
        ({"bias": "some"}, "bias is not supported; got 'some'"),
        ({"r": 8}, r"LoRA of model\.layers\.0\.self_attn\.q_proj has another rank; got 4"),
        ({"lora_alpha": "x"}, "lora_alpha must be a positive number; got 'x'"),
        ({"use_dora": True}, "not complete; got .*'A', 'B'.*; choices: A, B, magnitude_vector"),
        ({"target_modules": ["k_proj"]}, r"LoRA of layers\.1\.self_attn\.k_proj is missing"),
        ({"target_modules": ["k_proj"]}, r"does not name layers\.0\.self_attn\.q_proj"),
        ({"target_modules": "all-linear"}, r"layers\.1\.mlp\.up_proj is missing"),
        ({"target_modules": "("}, "target_modules must be a pattern"),
        ({"modules_to_save": ["lm_head"]}, "names lm_head, which is not in the file"),
        ({"trainable_token_indices": [1]}, "the tokens' rows are not in the file"),
    ],
)
def test_configurations_that_are_not_what_the_file_holds(base, tmp_path, config, words) -> None:
    folder, model = base
    maker = PeftMaker(model)
    layers("q_proj")(maker)
    adapter = maker.write(tmp_path / "adapter", **{"target_modules": ["q_proj"], **config})
    text = refused_export(folder, tmp_path, words, adapter_checkpoints=(adapter,))
    assert adapter in text


def test_every_tensor_that_does_not_fit_is_named(tmp_path: Path) -> None:
    MODELS["llama"].save(tmp_path / "base")
    wide = TinyModel("LlamaForCausalLM", "LlamaConfig", {**LLAMA, "hidden_size": 32}).make()
    maker = PeftMaker(wide)
    layers("q_proj", "down_proj")(maker)
    maker.tensors[f"{STEM}model.layers.7.mlp.up_proj.lora_A.weight"] = torch.zeros(4, 32)
    maker.tensors[f"{STEM}model.layers.7.mlp.up_proj.lora_B.weight"] = torch.zeros(24, 4)
    maker.tensors[f"{STEM}score.weight"] = torch.zeros(2, 32)
    adapter = maker.write(tmp_path / "adapter")
    text = refused_export(
        tmp_path / "base", tmp_path, "the adapter", adapter_checkpoints=(adapter,)
    )
    for words in (
        "no module of the base has layers.7.mlp.up_proj.weight",
        "no module of the base has score.weight",
        "learned for layers.0.self_attn.q_proj.weight does not fit",
        "learned for layers.1.mlp.down_proj.weight does not fit",
    ):
        assert words in text


def test_lora_of_a_table_that_the_base_ties(tmp_path: Path) -> None:
    """Merged by PEFT it changes both tables, and unmerged one."""
    model = MODELS["tied"].save(tmp_path / "base")
    maker = PeftMaker(model)
    maker.embedding(EMBED, 2.0)
    adapter = maker.write(tmp_path / "adapter")
    refused_export(tmp_path / "base", tmp_path, "was trained alone", adapter_checkpoints=(adapter,))


def test_tensors_that_no_part_is_named_like(tmp_path: Path) -> None:
    model = MODELS["llama"].save(tmp_path / "base")
    maker = PeftMaker(model)
    maker.tensors[f"{STEM}model.layers.0.mlp.up_proj.ia3_l"] = torch.ones(24, 1)
    adapter = maker.write(tmp_path / "adapter")
    refused_export(
        tmp_path / "base", tmp_path, "ia3_l is not a part", adapter_checkpoints=(adapter,)
    )
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    refused_export(tmp_path / "base", tmp_path, "holds no weights", adapter_checkpoints=(adapter,))


def test_values_that_are_not_finite_are_named(base, tmp_path: Path) -> None:
    folder, model = base
    maker = PeftMaker(model)
    maker.lora("model.layers.1.mlp.up_proj", 2.0)
    maker.tensors[f"{STEM}model.layers.1.mlp.up_proj.lora_A.weight"][0, 0] = float("nan")
    adapter = maker.write(tmp_path / "adapter")
    words = r"what was learned for layers\.1\.mlp\.up_proj\.weight has 1 NaN or infinite values"
    refused_export(folder, tmp_path, words, adapter_checkpoints=(adapter,))


def test_a_folder_without_an_adapter(base, tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    adapter = str(tmp_path / "adapter")
    words = r"holds no adapter that is known; choices: adapter_config\.json"
    refused_export(base[0], tmp_path, words, adapter_checkpoints=(adapter,))


def test_an_adapter_is_no_base(base, tmp_path: Path) -> None:
    adapter = PeftMaker(base[1]).write(tmp_path / "adapter")
    refused_export(Path(adapter), tmp_path, "is in no known format: it is an adapter: name it in")


def test_the_merged_files_are_verified(base, tmp_path: Path) -> None:
    folder, model = base
    maker = PeftMaker(model)
    layers(*LINEAR, dora=True)(maker)
    adapter = maker.write(tmp_path / "adapter", use_dora=True)
    export_folder(folder, tmp_path, 2, "fp16", adapter_checkpoints=(adapter,), verify=True)
