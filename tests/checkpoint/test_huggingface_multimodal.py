"""Models that read images, too: what is served answers text as transformers' whole model does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from launcher_scripts.checkpoint.export import open_source
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.sources.huggingface_architectures import read_sizes
from launcher_scripts.checkpoint.sources.huggingface_raw import MULTIMODAL, text_config
from launcher_scripts.common.errors import CheckpointError
from launcher_scripts.evaluation.tasks.transformers_model import TransformersModel
from tests.checkpoint.engine_answers import check_continued
from tests.checkpoint.exporting import change_json, export_folder
from tests.checkpoint.tiny_models import LATER_DECODERS, LLAMA
from tests.engine.test_hybrids import made

PROMPT = (5, 17, 2, 40, 66, 31, 8)
LENGTH = 6
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
QWEN_VISION = {
    "depth": 1,
    "embed_dim": 16,
    "hidden_size": 16,
    "out_hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 8,
    "deepstack_visual_indexes": [0],
}
MROPE = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [1, 1, 2]}
STRETCHED = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 2.0,
    "original_max_position_embeddings": LLAMA["max_position_embeddings"] // 2,
    "llama_4_scaling_beta": 0.1,
}
TEXT = {**LLAMA, "bos_token_id": 1, "eos_token_id": 0}
WIDE = {**TEXT, "head_dim": 8}
SHORT = {
    **TEXT,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
}
FEW = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
EXPERTS = {**FEW, "shared_expert_intermediate_size": 20}
QWEN2 = {**TEXT, "num_attention_heads": 2, "rope_parameters": MROPE}
TWO_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
HALF = {"rope_type": "default", "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
GLM = {**TEXT, **TWO_HEADS, "rope_parameters": {**HALF, "rope_theta": 5000.0}}
SIGLIP = {**VISION, "model_type": "siglip_vision_model"}
CLIP = {**VISION, "model_type": "clip_vision_model", "projection_dim": 16}
COHERE = {**TEXT, "model_type": "cohere2", "head_dim": 4, "sliding_window": 4}
SOUND = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SOUND |= {"intermediate_size": 64, "d_model": 16, "encoder_layers": 1, "encoder_ffn_dim": 24}
SOUND |= {"encoder_attention_heads": 2}
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("Gemma3", "Gemma3ForConditionalGeneration", {**WIDE, "sliding_window": 4}, VISION),
    "gemma4": (
        "Gemma4",
        "Gemma4ForConditionalGeneration",
        {**WIDE, "hidden_size_per_layer_input": 0, "global_head_dim": 16, "sliding_window": 4},
        {**VISION, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
    ),
    "lfm2_vl": (
        "Lfm2Vl",
        "Lfm2VlForConditionalGeneration",
        {**TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
        VISION,
    ),
    "idefics3": (
        "Idefics3",
        "Idefics3ForConditionalGeneration",
        {**LLAMA, "model_type": "llama", "bos_token_id": 1, "eos_token_id": 0},
        VISION,
    ),
    "internvl": (
        "InternVL",
        "InternVLForConditionalGeneration",
        {**LLAMA, "model_type": "qwen2"},
        {**VISION, "image_size": [16, 16], "patch_size": [8, 8]},
    ),
    "aya_vision": ("AyaVision", "AyaVisionForConditionalGeneration", COHERE, SIGLIP),
    "cohere2_vision": ("Cohere2Vision", "Cohere2VisionForConditionalGeneration", COHERE, SIGLIP),
    "glm4v": ("Glm4v", "Glm4vForConditionalGeneration", GLM, {**QWEN_VISION, "image_size": 16}),
    "glm4v_moe": (
        "Glm4vMoe",
        "Glm4vMoeForConditionalGeneration",
        {**GLM, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
        {**QWEN_VISION, "image_size": 16},
    ),
    "lighton_ocr": (
        "LightOnOcr",
        "LightOnOcrForConditionalGeneration",
        {**TEXT, "model_type": "qwen3"},
        {**VISION, "model_type": "pixtral", "head_dim": 8},
    ),
    "llava": (
        "Llava",
        "LlavaForConditionalGeneration",
        {**TEXT, "model_type": "llama"},
        CLIP,
    ),
    "llava_next": (
        "LlavaNext",
        "LlavaNextForConditionalGeneration",
        {**TEXT, "model_type": "mistral"},
        CLIP,
    ),
    "llava_onevision": (
        "LlavaOnevision",
        "LlavaOnevisionForConditionalGeneration",
        {**TEXT, "model_type": "qwen2"},
        SIGLIP,
    ),
    "qwen2_audio": (
        "Qwen2Audio",
        "Qwen2AudioForConditionalGeneration",
        {**TEXT, "model_type": "qwen2"},
        SOUND,
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        "Qwen3VLMoeForConditionalGeneration",
        {**WIDE, **FEW, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
        QWEN_VISION,
    ),
    "smolvlm": (
        "SmolVLM",
        "SmolVLMForConditionalGeneration",
        {**TEXT, "model_type": "llama"},
        VISION,
    ),
    "voxtral": (
        "Voxtral",
        "VoxtralForConditionalGeneration",
        {**TEXT, "model_type": "llama"},
        SOUND,
    ),
    "llama4": (
        "Llama4",
        "Llama4ForConditionalGeneration",
        {**WIDE, "num_local_experts": 3, "intermediate_size_mlp": 20},
        {**VISION, "intermediate_size": 64, "vision_output_dim": 16, "projector_input_dim": 16}
        | {"projector_output_dim": 16},
    ),
    "mistral3": (
        "Mistral3",
        "Mistral3ForConditionalGeneration",
        {**WIDE, "model_type": "mistral"},
        VISION,
    ),
    "ministral3": (
        "Mistral3",
        "Mistral3ForConditionalGeneration",
        {**WIDE, "model_type": "ministral3", "rope_parameters": STRETCHED},
        VISION,
    ),
    "qwen2_vl": (
        "Qwen2VL",
        "Qwen2VLForConditionalGeneration",
        QWEN2,
        QWEN_VISION,
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        "Qwen2_5_VLForConditionalGeneration",
        QWEN2,
        QWEN_VISION,
    ),
    "qwen3_5": ("Qwen3_5", "Qwen3_5ForConditionalGeneration", SHORT, QWEN_VISION),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        "Qwen3_5MoeForConditionalGeneration",
        {**SHORT, **EXPERTS},
        QWEN_VISION,
    ),
    "qwen3_vl": (
        "Qwen3VL",
        "Qwen3VLForConditionalGeneration",
        {**WIDE, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
        QWEN_VISION,
    ),
}
SPECIAL = {
    name: 60 + number
    for number, name in enumerate(
        ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    )
}


def make(name: str) -> Any:
    """A tiny model of random weights, images included."""
    torch.manual_seed(5)
    kind, model, text, vision = MODELS[name]
    special = SPECIAL if name.startswith("qwen") else {}
    more = {"audio_config" if vision is SOUND else "vision_config": vision, **special}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, tie_word_embeddings=False, **more
    )
    whole = getattr(transformers, model)(config).eval()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.normal_(0.05, 0.3)
    if text is COHERE:  # whose scale of logits transformers' classes around it leave out
        whole.lm_head.register_forward_hook(lambda _module, _inputs, logits: logits * 0.0625)
    return whole


def check(model: Any, folder: Path, tmp_path: Path) -> None:
    check_continued(model, export_folder(folder, tmp_path), PROMPT, LENGTH)


@pytest.mark.parametrize("name", MODELS)
def test_text_is_answered_as_the_whole_model_does(tmp_path: Path, name: str) -> None:
    model = make(name)
    model.save_pretrained(tmp_path / "hf")
    checkpoint = open_source(Archive(tmp_path / "hf"))
    assert any("images" in note for note in checkpoint.notes)
    sizes = read_sizes(tmp_path / "hf")
    assert sizes is not None and sizes.num_layers == 2
    check(model, tmp_path / "hf", tmp_path)


def test_every_row_is_tried() -> None:
    elsewhere = {"gemma3n", "t5gemma2"}
    assert {*MODELS, *PUBLISHED, *elsewhere} - {"ministral3"} == MULTIMODAL.keys()


# Model types whose whole classes need more than a test has -> the decoder, its class, how the
# names of its tensors begin, and how published ones do.
PUBLISHED = {
    "kimi_k25": ("deepseek_v3", "KimiK25ForConditionalGeneration", "model."),
    "nemotron_h_omni": ("nemotron_h", "NemotronH_Omni_Reasoning_V3", "backbone."),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_decoder_within_files_as_they_were_published(name: str, tmp_path: Path) -> None:
    decoder, kind, prefix = PUBLISHED[name]
    folder = tmp_path / "hf"
    model = made(decoder) if decoder == "nemotron_h" else LATER_DECODERS[decoder].make()
    model.save_pretrained(folder)
    section = "llm_config" if name == "nemotron_h_omni" else "text_config"
    published = {
        "architectures": [kind],
        "model_type": name,
        section: json.loads((folder / "config.json").read_text()),
        "vision_config": {"model_type": "radio"},
    }
    names = {old: f"language_model.{old}" for old in (prefix, "lm_head.")}
    rewritten(folder, published, names)
    tensors = load_file(folder / "model.safetensors")
    for other in ("vision_tower.a", "vision_model.b", "mm_projector.c", "mlp1.0.d", "sound_e.f"):
        tensors[other] = torch.ones(2, 2)
    save_file(tensors, folder / "model.safetensors")
    check(model, folder, tmp_path)


def rewritten(folder: Path, config: dict[str, Any], names: dict[str, str]) -> None:
    """Files as they were published: another config.json, and other beginnings of names."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink(missing_ok=True)
    tensors = load_file(folder / "model.safetensors")
    renamed = {}
    for name, tensor in tensors.items():
        old = next((old for old in names if name.startswith(old)), "")
        renamed[names.get(old, "") + name.removeprefix(old)] = tensor
    save_file(renamed, folder / "model.safetensors")


def test_a_gemma_3_as_it_was_published(tmp_path: Path) -> None:
    """Its text_config leaves out what the class knows, and its tensors had other names."""
    folder = tmp_path / "hf"
    model = make("gemma3")
    model.save_pretrained(folder)
    said = json.loads((folder / "config.json").read_text())
    known = {"model_type", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim"}
    sizes = {"hidden_size", "intermediate_size", "num_hidden_layers", "sliding_window"}
    text = {key: said["text_config"][key] for key in known | sizes}
    published = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 63,
        "eoi_token_index": 64,
        "eos_token_id": [0, 65],
        "image_token_index": 66,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 4,
        "model_type": "gemma3",
        "text_config": text,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
        "vision_config": {**VISION, "model_type": "siglip_vision_model"},
    }
    names = {
        "model.language_model.": "language_model.model.",
        "model.vision_tower.": "vision_tower.vision_model.",
        "model.multi_modal_projector.": "multi_modal_projector.",
        "lm_head.": "language_model.lm_head.",
    }
    rewritten(folder, published, names)
    check(model, folder, tmp_path)
    bare = {key: value for key, value in text.items() if key not in known} | {"model_type": "x"}
    found = text_config({**published, "text_config": bare})
    assert (found["vocab_size"], found["num_key_value_heads"]) == (262208, 4)
    assert found["model_type"] == "gemma3_text" and found["eos_token_id"] == [0, 65]


def test_a_gemma_3n_as_it_was_published(tmp_path: Path) -> None:
    """The class of the whole one needs a library of images: this one is made of its decoder."""
    folder = tmp_path / "hf"
    text = transformers.Gemma3nTextConfig(
        **{**WIDE, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 64},
        num_kv_shared_layers=0,
        laurel_rank=4,
        sliding_window=4,
    )
    model = transformers.Gemma3nForCausalLM(text).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.05, 0.3)
    model.save_pretrained(folder)
    published = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "model_type": "gemma3n",
        "text_config": json.loads((folder / "config.json").read_text()),
        "audio_config": {"model_type": "gemma3n_audio"},
        "vision_config": {"model_type": "gemma3n_vision"},
    }
    rewritten(folder, published, {"model.": "model.language_model."})
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.vision_tower.a", "model.audio_tower.b", "model.embed_audio.c.weight"):
        tensors[name] = torch.ones(2, 2)
    save_file(tensors, folder / "model.safetensors")
    check(model, folder, tmp_path)


def test_a_qwen2_5_vl_as_it_was_published(tmp_path: Path) -> None:
    """Without a text_config, and with the decoder's tensors named as in a model of text."""
    folder = tmp_path / "hf"
    model = make("qwen2_5_vl")
    model.save_pretrained(folder)
    said = json.loads((folder / "config.json").read_text())
    text = {key: value for key, value in said["text_config"].items() if "rope" not in key}
    published = {
        **text,
        "image_token_id": 60,
        "model_type": "qwen2_5_vl",
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
        "rope_theta": 5000.0,
        "tie_word_embeddings": False,
        "vision_config": said["vision_config"],
        "vision_token_id": 62,
    }
    rewritten(folder, published, {"model.language_model.": "model.", "model.visual.": "visual."})
    check(model, folder, tmp_path)


def test_positions_whose_queries_would_be_scaled_are_left_out(tmp_path: Path) -> None:
    make("ministral3").save_pretrained(tmp_path / "hf")
    whole = LLAMA["max_position_embeddings"]
    sizes, checkpoint = read_sizes(tmp_path / "hf"), open_source(Archive(tmp_path / "hf"))
    assert sizes is not None and sizes.max_positions == whole // 2
    assert f"of {whole} positions the first {whole // 2} are served" in " ".join(checkpoint.notes)


def test_a_key_that_nothing_reads_is_refused(tmp_path: Path) -> None:
    make("mistral3").save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "config.json"
    text = json.loads(file.read_text())["text_config"]
    change_json(file, text_config=text | {"attention_sink": 4})
    with pytest.raises(CheckpointError, match="attention_sink is not known here"):
        open_source(Archive(tmp_path / "hf"))


def test_the_reference_is_the_whole_model(tmp_path: Path) -> None:
    model = make("qwen2_5_vl")
    model.save_pretrained(tmp_path / "hf")
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([PROMPT])).logits[0]
    found = TransformersModel(tmp_path / "hf").logits(PROMPT)
    torch.testing.assert_close(torch.as_tensor(found), expected)
