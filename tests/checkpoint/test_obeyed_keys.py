"""Keys and classes of a config.json that transformers does not follow for the model type: refused,
where other programs would read another model than transformers does."""

from __future__ import annotations

import ast
import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from launcher_scripts.checkpoint.sources import huggingface_architectures as table
from launcher_scripts.checkpoint.sources import huggingface_classes as classes
from launcher_scripts.checkpoint.sources.huggingface import without_prefix
from launcher_scripts.checkpoint.sources.huggingface_raw import RawConfig
from launcher_scripts.common.errors import CheckpointError, Problems
from tests.checkpoint.exporting import change_json, export_folder, refused_export
from tests.checkpoint.tiny_models import DECODERS, ENCODER_DECODERS, LATER_DECODERS

LATENT_TYPES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
IDS = torch.tensor([[5, 17, 2, 40, 66, 31, 8, 22, 11]])
OTHER = {
    "partial_rotary_factor": (0.5, 1.0),
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
    "attn_logit_softcapping": (0.5, 0.25),
    "first_k_dense_replace": (1, 0),
    "mlp_layer_types": (["sparse", "dense"], ["dense", "sparse"]),
}
# Keys whose effect logits of one text do not show: lengths, and the first token of an answer.
UNSEEN = ("n_positions", "seq_length", "force_bos_token_to_be_generated")
# transformers 5 computes these from other keys of the same file, or for every model alike. MiMo's
# tensors have other shapes where its key differs.
DERIVED = (
    *(("t5", "feed_forward_proj"), ("mt5", "feed_forward_proj"), ("umt5", "feed_forward_proj")),
    *(("umt5", "scale_decoder_outputs"), ("mimo_v2_flash", "swa_num_key_value_heads")),
)
# transformers broadcasts the fewer cosines of these tiny models; readers refuse the key.
REFUSED = [(name, "partial_rotary_factor") for name in (*LATENT_TYPES, "minicpm3", "youtu")]
# What readers ask for only with it.
WINDOW = {"sliding_window": 3, "use_sliding_window": True}


def by_type() -> dict[str, str]:
    """Model type -> name of a tiny model with rotary positions."""
    names: dict[str, str] = {}
    for name, model in {**LATER_DECODERS, **DECODERS}.items():
        config = model.make().config
        if config.model_type not in names and hasattr(config, "rope_parameters"):
            names[config.model_type] = name
    return names


def outputs(model: PreTrainedModel, raw: dict[str, Any]) -> torch.Tensor | None:
    """Logits of the model's weights in its class with another config; None if they do not fit."""
    torch.manual_seed(1)
    try:
        other = type(model)(type(model.config).from_dict(raw)).eval()
        other.load_state_dict(model.state_dict())
        more = {"decoder_input_ids": IDS} if raw.get("is_encoder_decoder") else {}
        with torch.no_grad():
            return other(IDS, **more).logits
    except Exception:  # of transformers' own checks and shapes, of any type
        return None


@pytest.mark.slow
@pytest.mark.parametrize("key", OTHER)
def test_a_key_that_transformers_ignores_is_refused(key: str) -> None:
    """Whether its class follows the key is seen from the logits."""
    assert {*OTHER} == {*classes.OBEYED}
    for model_type, name in by_type().items():
        model = {**LATER_DECODERS, **DECODERS}[name].make()
        raw = json.loads(json.dumps(model.config.to_dict(), default=str))
        raw.pop("dtype", None)
        changed = copy.deepcopy(raw)
        section = changed
        if key == "partial_rotary_factor" and isinstance(raw.get("rope_parameters"), dict):
            section = changed["rope_parameters"]
        values = [value_for(raw, value) for value in OTHER[key]]
        section[key] = next(value for value in values if value != section.get(key))
        before, after = outputs(model, raw), outputs(model, changed)
        assert before is not None, model_type
        names = [without_prefix(name) for name in model.state_dict()]
        refused = read(changed, names) is None
        if after is not None and torch.allclose(before, after, atol=1e-6):
            assert refused or read(changed, names) == read(raw, names), (model_type, key)
        elif after is not None:
            assert not refused or (model_type, key) in REFUSED, (model_type, key)


def value_for(raw: dict[str, Any], value: Any) -> Any:
    """A value, of which a list is as long as the model has layers."""
    layers = raw.get("num_hidden_layers")
    return (value * layers)[:layers] if isinstance(value, list) and value and layers else value


def words_of(model: PreTrainedModel) -> set[str]:
    """Names and texts in the source of a model's class and of those that it inherits from."""
    result: set[str] = set()
    modules = {item.__module__ for item in type(model).__mro__}
    for name in (name for name in modules if name.startswith("transformers.models.")):
        for node in ast.walk(ast.parse(Path(str(sys.modules[name].__file__)).read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                result.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                result.add(node.value)
    return result


@pytest.mark.slow
def test_no_other_key_is_read_that_transformers_ignores() -> None:
    """A key that the source of its class does not have is given other values, of all models': where
    the hyperparameters follow, so must the logits.
    """
    made = [model.make() for model in {**LATER_DECODERS, **DECODERS, **ENCODER_DECODERS}.values()]
    raws = [json.loads(json.dumps(model.config.to_dict(), default=str)) for model in made]
    values: dict[str, list[Any]] = {}
    for raw in raws:
        raw.pop("dtype", None)
        for key, value in raw.items():
            if value not in (seen := values.setdefault(key, [])) and not isinstance(value, dict):
                seen.append(value)
    silent = {
        (raw["model_type"], key)
        for model, plain in zip(made, raws, strict=True)
        for raw in (plain, plain | {key: WINDOW[key] for key in WINDOW if key in plain})
        for key in ignored_keys(model, raw, values)
    }
    assert silent <= {*DERIVED}


def ignored_keys(
    model: PreTrainedModel, raw: dict[str, Any], values: dict[str, list[Any]]
) -> list[str]:
    """Keys whose value changes the hyperparameters and not the logits.  values: to try, by key"""
    names = [without_prefix(name) for name in model.state_dict()]
    if (config := read(raw, names)) is None or (before := outputs(model, raw)) is None:
        return []
    asked = RawConfig(raw, names, Problems("it"))
    table.ARCHITECTURES[raw["model_type"]].read(asked)
    keys = {key for key in asked.read_keys if not key.endswith("_token_id")}
    result = []
    for key in sorted(keys - words_of(model) - {*UNSEEN}):
        for value in [True, False, 1, 2, 2.0, *values.get(key, ())]:
            changed = raw | {key: value_for(raw, value)}
            if type(value) is not type(raw.get(key, value)) or read(changed, names) in (
                None,
                config,
            ):
                continue
            after = outputs(model, changed)
            if after is not None and torch.allclose(before, after, atol=1e-6):
                result.append(key)
                break
    return result


def read(raw: dict[str, Any], names: list[str]) -> Any:
    """Hyperparameters by the reader of the model type; None if it refuses."""
    values = RawConfig(raw, names, Problems("it"))
    classes.reject_disobeyed(values)
    try:
        config = table.ARCHITECTURES[raw["model_type"]].read(values)
    except CheckpointError:
        return None
    return None if values.problems.messages else config


@pytest.mark.parametrize(
    "said",
    [
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
    ],
)
def test_a_share_of_rotary_dimensions_that_llama_does_not_read(said: Any, tmp_path: Path) -> None:
    DECODERS["llama"].make().save_pretrained(tmp_path / "hf")
    change_json(tmp_path / "hf" / "config.json", **said)
    refused_export(tmp_path / "hf", tmp_path, "transformers' class of llama ignores it, and other")
    harmless = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
    change_json(
        tmp_path / "hf" / "config.json", partial_rotary_factor=1.0, rope_scaling=None, **harmless
    )
    export_folder(tmp_path / "hf", tmp_path)


def classes_of(model_type: str) -> set[str]:
    tables = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    family = table.ARCHITECTURES[model_type].family if model_type in table.ARCHITECTURES else ""
    tables = tables[:1] if family == "gpt" else tables[1:2] if family else tables[1:]
    return {each[model_type] for each in tables if model_type in each}


def noted(model_type: str, allowed: bool = False, **said: Any) -> RawConfig:
    values = RawConfig({"model_type": model_type}, [], Problems("it"))
    row = table.ARCHITECTURES.get(model_type, table.ARCHITECTURES["llama"])
    classes.check_classes(values, {"model_type": model_type, **said}, row.family, allowed)
    return values


@pytest.mark.parametrize("model_type", sorted({*table.ARCHITECTURES, *table.MULTIMODAL}))
def test_transformers_own_class_is_known_and_its_others_are_not(model_type: str) -> None:
    own = classes_of(model_type)
    assert own or model_type in ("agm", "nemotron-nas")
    for name in own:
        found = noted(model_type, architectures=[name])
        assert not found.problems.messages
        assert not found.notes
    for mapping in (
        modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    ):
        if own and model_type in mapping:
            assert noted(model_type, architectures=[mapping[model_type]]).problems.messages
    if own:
        assert noted(model_type, architectures=["OtherForCausalLM"]).problems.messages


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("llama", "LLaMAForCausalLM"),
        ("mpt", "MPTForCausalLM"),
        ("ernie4_5", "Ernie4_5_ForCausalLM"),
        ("qwen2", "FSDPQwen2ForCausalLM"),
        ("t5", "T5WithLMHeadModel"),
        ("t5", "T5EncoderModel"),
        ("nemotron-nas", "DeciLMForCausalLM"),
    ],
)
def test_names_under_which_models_were_published(model_type: str, name: str) -> None:
    found = noted(model_type, architectures=[name], auto_map={"AutoModel": f"modeling.{name}"})
    assert not found.problems.messages
    assert "is not read" in found.notes[0]


def test_code_for_other_tasks_is_no_model_of_its_own() -> None:
    """As published with Falcon 7B."""
    names = ("Model", "ForCausalLM", "ForSequenceClassification", "ForQuestionAnswering")
    code = {f"AutoModel{name.removeprefix('Model')}": f"modeling.Falcon{name}" for name in names}
    found = noted("falcon", architectures=["FalconForCausalLM"], auto_map=code)
    assert not found.problems.messages
    assert len(found.notes) == 1


def test_a_base_class_is_exported_with_a_note() -> None:
    assert noted("bart", architectures=["BartModel"]).notes == [
        "BartModel has no output layer: exported with bart's own"
    ]


@pytest.mark.parametrize(
    "said",
    [
        {"architectures": ["LlamaBidirectionalModel"]},
        {"architectures": ["LlamaForCausalLM", "OtherForCausalLM"]},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": [7]},
        {"auto_map": {"AutoModelForCausalLM": "modeling_other.OtherForCausalLM"}},
        {"auto_map": {"AutoModel": ["a/b--modeling.Other", None]}},
        {"auto_map": [1]},
    ],
)
def test_code_and_classes_of_its_own(said: Any, tmp_path: Path, capsys: Any) -> None:
    DECODERS["llama"].make().save_pretrained(tmp_path / "hf")
    change_json(tmp_path / "hf" / "config.json", **said)
    text = refused_export(tmp_path / "hf", tmp_path, "architectures")
    if "must be a list" not in text:
        assert "export.model.allow_custom_code_config=True" in text
        export_folder(tmp_path / "hf", tmp_path, allow_custom_code_config=True)
        assert "note: exported as llama, although config.json names [" in capsys.readouterr().out


def test_a_configuration_class_alone_is_not_a_model() -> None:
    for said in (
        "configuration.C",
        {"AutoConfig": "configuration.C", "AutoTokenizer": ["t.T", None]},
    ):
        found = noted("llama", auto_map=said)
        assert not found.problems.messages
        assert not found.notes


def test_underscored_texts_and_switches_say_nothing_of_the_network(tmp_path: Path) -> None:
    DECODERS["llama"].make().save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    change_json(path, _attn_implementation_internal="sdpa", _moe=True, _a="b")
    export_folder(tmp_path / "hf", tmp_path)
    change_json(path, _logit_cap=30)
    refused_export(tmp_path / "hf", tmp_path / "a", "_logit_cap is not known here")
    change_json(path, _logit_cap=None, logit_cap="30")
    refused_export(tmp_path / "hf", tmp_path / "a", "logit_cap is not known here")


def test_solar_open_has_no_size_of_a_dense_mlp(tmp_path: Path) -> None:
    LATER_DECODERS["solar_open"].make().save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    raw = json.loads(path.read_text())
    raw.pop("intermediate_size", None)
    path.write_text(json.dumps(raw))
    export_folder(tmp_path / "hf", tmp_path)
    change_json(path, first_k_dense_replace=1)
    refused_export(tmp_path / "hf", tmp_path / "a", "first_k_dense_replace: transformers' class of")


def test_smollm3_layers_with_a_window_that_is_switched_off(tmp_path: Path) -> None:
    LATER_DECODERS["smollm3"].make().save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    said = {"use_sliding_window": False, "sliding_window": 4}
    change_json(path, **said, layer_types=["sliding_attention", "full_attention"] * 2)
    with pytest.raises(CheckpointError, match="layer_types is not supported"):
        export_folder(tmp_path / "hf", tmp_path)


def test_a_bart_and_a_t5_name_their_own_classes(tmp_path: Path) -> None:
    for name in ("bart", "t5_v1_1"):
        ENCODER_DECODERS[name].make().save_pretrained(tmp_path / name)
        change_json(tmp_path / name / "config.json", architectures=["BartForCausalLM"])
        refused_export(tmp_path / name, tmp_path, "BartForCausalLM")
