"""Transformers folders as a target: of every family, from every kind of source, and failures."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto import modeling_auto

from launcher_scripts.checkpoint import export as export_module
from launcher_scripts.checkpoint.fastertransformer.manifest import (
    HUGGINGFACE_FORMAT,
    FileEntry,
    check_files,
    read_manifest,
    source_digest,
)
from launcher_scripts.checkpoint.huggingface import folder as folder_module
from launcher_scripts.checkpoint.huggingface.config_json import NOT_WRITTEN, transformers_class
from launcher_scripts.checkpoint.huggingface.export import export_huggingface
from launcher_scripts.checkpoint.huggingface.folder import HuggingFaceWriter
from launcher_scripts.checkpoint.huggingface.tensors import name_prefix
from launcher_scripts.checkpoint.sources.huggingface_architectures import ARCHITECTURES
from launcher_scripts.common.errors import CheckpointError, ConfigError, Problems
from launcher_scripts.common.files import SOURCE_DIGESTS
from launcher_scripts.common.tokenizer import load_tokenizer
from launcher_scripts.config.export import HuggingFaceOptions, TokenizerSettings
from launcher_scripts.config.settings import ExportSettings
from launcher_scripts.launcher import CHECKOUT
from tests.checkpoint.exporting import export_folder
from tests.checkpoint.peft_maker import PeftMaker
from tests.checkpoint.tiny_models import (
    DECODERS,
    ENCODER_DECODERS,
    LATER_DECODERS,
    T5GEMMA,
    UNTIED_DECODERS,
)
from tests.checkpoint_maker import Variant, make_nemo, small_config
from tests.engine.test_later_decoders import MADE

DATA = Path(__file__).parents[1] / "data"
MODELS = {
    **DECODERS,
    **LATER_DECODERS,
    **UNTIED_DECODERS,
    **ENCODER_DECODERS,
    "t5gemma": T5GEMMA,
}
# Which are refused: a norm of each head, or experts of all layers, are tensors of their own.
del MODELS["stablelm2_12b"], MODELS["dbrx"]
# Layouts of these have no inverse: their exports do not come back.
ONE_WAY = ("mimo_v2_flash",)
GEMMAS = ("gemma4_text", "gemma4_inputs", "gemma4_experts", "gemma3n_text")
# Their exports have the projections in their tables, so that the model comes back without them.
PROJECTED = ("opt_350m", "opt_350m_untied")
# Rows of a table of positions that no token of a text has.
UNUSED_ROWS = 2
PROMPT = (5, 17, 2, 40, 66, 31, 8)
# config.json of these is told by the hyperparameters alone, for the type itself or an equal one.
QUICK = ("gpt2", "llama_31", "phi3_long", "gemma3", "falcon_40b", "gpt_oss", "glm4_moe", "gptj")
TOLD = (
    *("bloom", "opt", "opt_350m", "llama_linear", "llama_dynamic"),
    *("llama_yarn_scaled", "mistral_window", "qwen2_window", "qwen3", "gemma"),
    *("gemma2", "phi", "stablelm_parallel", "smollm3", "cohere2", "glm4", "helium"),
    *("olmo2_groups", "olmo3", "exaone4", "olmo", "vaultgemma", "granite", "granitemoeshared"),
    *("youtu", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
    *("nemotron", "mixtral", "qwen2_moe", "qwen3_moe_sparse", "dots1"),
    *("ernie4_5_moe", "minimax_m2", "gpt_neox", "codegen", "gpt_neo"),
    *("falcon_7b", "falcon_rw", "gpt_bigcode", "mpt", "jais2", "seed_oss"),
)
CORE_DATA = ("bridge031_llama31_a", "nemo253_llama31_a", "mcore019_qwen3_nonhomog_a")


def told(names: tuple[str, ...], *marks: Any) -> list[Any]:
    return [pytest.param(name, marks=marks) for name in names]


def convert(checkpoint: Path, folder: Path, data_type: str = "auto", **more: Any) -> Path:
    """Write a transformers folder, without a tokenizer unless `more` says otherwise."""
    names = ("max_shard_size", "vocab_size")
    options = {name: more.pop(name) for name in names if name in more}
    values = {"tokenizer": TokenizerSettings("none"), "processes": 2, "model_type": "", **more}
    settings = ExportSettings(
        model_name="m",
        checkpoint_path=str(checkpoint),
        triton_model_dir=str(folder.with_name("unused")),
        weight_data_type=data_type,
        format="huggingface",
        huggingface=HuggingFaceOptions(folder=str(folder), **options),
        **values,
    )
    return export_huggingface(settings)


def tensors(folder: Path) -> dict[str, np.ndarray]:
    result = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                values = file.get_tensor(name)
                bits = values.view(torch.int16) if values.dtype == torch.bfloat16 else values
                result[name] = bits.numpy()
    return result


def check_same_tensors(one: Path, other: Path, skipped_rows: int = 0) -> None:
    """The same names, and the same bytes but for the first rows of tables of positions."""
    expected, found = tensors(one), tensors(other)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        first = skipped_rows if "embed_positions" in name else 0
        assert found[name].dtype == values.dtype, name
        assert found[name].shape == values.shape, name
        rows = (np.atleast_1d(array)[first:] for array in (found[name], values))
        np.testing.assert_array_equal(*rows, err_msg=name)


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits


def json_of(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_scores_by_layer_are_in_the_weights(tmp_path: Path) -> None:
    """A GPT-2 with such scores is written as one without; LoRA of it would not fit."""
    model = MADE["gpt2_by_layer"](tmp_path / "hf")
    out = convert(tmp_path / "hf", tmp_path / "direct")
    assert not json_of(out / "config.json").get("scale_attn_by_inverse_layer_idx")
    torch.testing.assert_close(logits(out), logits(tmp_path / "hf"), rtol=1e-5, atol=1e-5)
    maker = PeftMaker(model)
    maker.lora("transformer.h.1.attn.c_attn", 2.0, conv=True)
    adapter = maker.write(tmp_path / "adapter", target_modules=["c_attn"], fan_in_fan_out=True)
    with pytest.raises(CheckpointError, match="LoRA of a GPT-2 with scale_attn_by_inverse_layer"):
        export_folder(tmp_path / "hf", tmp_path / "a", adapter_checkpoints=(adapter,))


@pytest.mark.parametrize("name", MODELS)
def test_every_family_comes_back(name: str, tmp_path: Path) -> None:
    """As save_pretrained has written it: names, bytes, types and config.json."""
    MODELS[name].make().save_pretrained(tmp_path / "hf")
    out = convert(tmp_path / "hf", tmp_path / "direct")
    check_same_tensors(tmp_path / "hf", out)
    kept = json_of(tmp_path / "hf" / "config.json")
    changed = {**json_of(out / "config.json"), "tie_word_embeddings": None, "torch_dtype": None}
    assert changed == {**changed, **kept, "tie_word_embeddings": None}
    if name in PROJECTED:
        return
    if name in ONE_WAY:
        with pytest.raises(CheckpointError, match=r"cannot be computed back \(layout "):
            convert(export_folder(tmp_path / "hf", tmp_path, 2), tmp_path / "back")
        return
    served = export_folder(tmp_path / "hf", tmp_path, 1 if name in ("bloom", "mpt") else 2)
    back = convert(served, tmp_path / "back")
    check_same_tensors(tmp_path / "hf", back, UNUSED_ROWS)
    assert json_of(back / "config.json") == json_of(out / "config.json")


def test_norms_of_single_heads_are_not_written_under_another_name(tmp_path: Path) -> None:
    LATER_DECODERS["stablelm2_12b"].make().save_pretrained(tmp_path / "hf")
    with pytest.raises(CheckpointError, match=r"query_norm.* back \(layout heads_in_a_row\)"):
        convert(tmp_path / "hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", GEMMAS)
def test_tables_of_all_layers_come_back(name: str, tmp_path: Path) -> None:
    """Also of fewer rows than the vocabulary; values that are keys, and layers that share them."""
    MADE[name](tmp_path / "hf")
    served = export_folder(tmp_path / "hf", tmp_path, 2 if name == "gemma3n_text" else 1)
    for source in (tmp_path / "hf", served):
        out = convert(source, tmp_path / f"from-{source.name}", verify=True)
        check_same_tensors(tmp_path / "hf", out)
        expected = json_of(tmp_path / "hf" / "config.json")
        assert json_of(out / "config.json")["architectures"] == expected["architectures"]
        torch.testing.assert_close(logits(out), logits(tmp_path / "hf"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [*told(QUICK), *told(TOLD, pytest.mark.slow)])
def test_hyperparameters_alone_say_config_json(name: str, tmp_path: Path) -> None:
    """Of shards whose manifest is lost; transformers computes the same logits."""
    MODELS[name].make().save_pretrained(tmp_path / "hf")
    served = export_folder(tmp_path / "hf", tmp_path)
    (served / "manifest.json").unlink()
    out = convert(served, tmp_path / "out")
    torch.testing.assert_close(logits(out), logits(tmp_path / "hf"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CORE_DATA)
def test_checkpoints_of_megatron_core_give_its_logits(name: str, tmp_path: Path) -> None:
    """Megatron-LM's own logits lie beside its checkpoints."""
    source = DATA / "core" / name
    has_tokenizer = not name.startswith("mcore")
    tokenizer = TokenizerSettings("auto" if has_tokenizer else "none")
    out = convert(source / "checkpoint", tmp_path / "out", "fp32", tokenizer=tokenizer)
    reference = np.load(source / "reference.npz")
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    with torch.no_grad():
        found = model(torch.tensor(reference["tokens"])).logits.numpy()
    rows = found.shape[-1]
    np.testing.assert_allclose(found, reference["logits"][..., :rows], rtol=1e-5, atol=1e-5)
    if has_tokenizer:
        assert rows == len(AutoTokenizer.from_pretrained(out)) < reference["logits"].shape[-1]


NEMOS = {
    "classic": (Variant(legacy_qkv=True), {}),
    "ranks": (Variant("mcore", tp_size=2, pp_size=2), {"num_kv_heads": 2}),
    "torch_dist": (Variant("torch_dist", dtype="bf16"), {"num_kv_heads": 2}),
    "plus_one": (Variant("mcore", plus_one=True), {"normalization": "layernorm"}),
    "post": (Variant(), {"norm_placement": "post", "final_norm": False}),
}
TYPES = {"classic": "gpt2", "plus_one": "stablelm", "post": "opt"}
LLAMA = {
    "position_embedding": "rope",
    "normalization": "rmsnorm",
    "activation": "silu",
    "gated": True,
    "attention_bias": False,
    "mlp_bias": False,
    "tied_embeddings": False,
}


@pytest.mark.parametrize("name", NEMOS)
def test_checkpoints_of_nemo(name: str, tmp_path: Path) -> None:
    """Their folder is that of their shards, which were compared with the engine."""
    variant, changes = NEMOS[name]
    more = LLAMA if variant.form != "nemo" else {}
    make_nemo(tmp_path / "a.nemo", small_config(**{**more, **changes}), variant)
    out = convert(tmp_path / "a.nemo", tmp_path / "out")
    back = convert(export_folder(tmp_path / "a.nemo", tmp_path, 2, "auto"), tmp_path / "back")
    check_same_tensors(back, out)
    assert json_of(out / "config.json") == json_of(back / "config.json")
    assert json_of(out / "config.json")["model_type"] == TYPES.get(name, "llama")
    assert torch.isfinite(logits_of_small(out)).all()


def logits_of_small(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([[5, 17, 2, 40]])).logits


def test_padding_of_the_vocabulary_is_left_out(base: Path, tmp_path: Path) -> None:
    whole = convert(base, tmp_path / "whole")
    cut = convert(base, tmp_path / "cut", vocab_size=41)
    name = "transformer.wte.weight"
    np.testing.assert_array_equal(tensors(cut)[name], tensors(whole)[name][:41])
    torch.testing.assert_close(logits_of_small(cut), logits_of_small(whole)[..., :41])
    with pytest.raises(CheckpointError, match=r"fewer rows.*got 49.*vocab_size"):
        convert(base, tmp_path / "more", vocab_size=49)


def test_a_model_without_a_class_is_refused_by_name(tmp_path: Path) -> None:
    config = small_config(norm_placement="post", final_norm=False, position_embedding="rope")
    make_nemo(tmp_path / "a.nemo", config, Variant(raw={"transformer_block_type": "post_ln"}))
    with pytest.raises(CheckpointError, match=r"no class .* nearest are .* instead of "):
        convert(tmp_path / "a.nemo", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.nemo"]


def test_a_model_without_a_class_is_refused_by_the_command(tmp_path: Path) -> None:
    """In one line, before anything is written."""
    config = small_config(norm_placement="post", final_norm=False, position_embedding="rope")
    make_nemo(tmp_path / "hf", config, Variant(raw={"transformer_block_type": "post_ln"}))
    words = ["launcher_scripts.launcher", "convert", "hf", "out", "export.model.tokenizer=none"]
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done
    reason = "transformers has no class of the model in"
    assert reason in done.stdout + done.stderr
    assert not [*tmp_path.glob("out*")]


def test_every_type_has_the_class_and_the_names_of_transformers() -> None:
    config = small_config()
    for name, row in ARCHITECTURES.items():
        if name in NOT_WRITTEN:
            continue
        found = transformers_class(name, config)
        tables = [modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
        if row.family != "gpt":
            tables = [modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES]
        assert found in {table.get(name) for table in tables}, name
        if name == "llama4_text":
            continue  # its base_model_prefix is that of the model with images
        prefix = getattr(transformers, found).base_model_prefix + "."
        assert name_prefix(name) in (prefix, "" if row.family == "t5" else prefix), name


@pytest.mark.parametrize("data_type", ["fp32", "fp16", "bf16"])
def test_types(data_type: str, tmp_path: Path) -> None:
    model = MODELS["llama"].save(tmp_path / "hf")
    out = convert(tmp_path / "hf", tmp_path / "out", data_type)
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[data_type]
    for name, values in loaded.state_dict().items():
        assert torch.equal(values, model.state_dict()[name].to(dtype)), name


def test_an_adapter_is_merged(tmp_path: Path) -> None:
    model = MODELS["llama"].save(tmp_path / "hf")
    maker = PeftMaker(model)
    for module in maker.modules("q_proj", "down_proj"):
        maker.lora(module, 2.0)
    maker.write(tmp_path / "lora", r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    adapters = (str(tmp_path / "lora"),)
    out = convert(tmp_path / "hf", tmp_path / "out", adapter_checkpoints=adapters)
    for name, values in tensors(out).items():
        np.testing.assert_allclose(values, maker.merged[name].numpy(), rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigError, match="adapter_checkpoints, which are merged"):
        convert(tmp_path / "hf", tmp_path / "no", prompt_checkpoints=adapters)


def test_shards_have_an_index(tmp_path: Path) -> None:
    MODELS["llama"].save(tmp_path / "hf")
    out = convert(tmp_path / "hf", tmp_path / "out", max_shard_size="5KB")
    index = json_of(out / "model.safetensors.index.json")
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert files == sorted({*index["weight_map"].values()}) and len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    sizes = [values.nbytes for values in tensors(out).values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    torch.testing.assert_close(logits(out), logits(tmp_path / "hf"), rtol=1e-5, atol=1e-5)
    problems, manifest = Problems("the folder"), read_manifest(out)
    assert manifest is not None and manifest.format == HUGGINGFACE_FORMAT
    check_files(out, manifest.entries, problems, digests=True)
    assert not problems.messages
    names = {path.name for path in out.iterdir()} - {"manifest.json"}
    assert manifest.entries.keys() == names


TEXTS = ("Hello, world! 12345 caf\u00e9", " two  spaces \n\n x", "a b")


@pytest.mark.parametrize("kind", ["sentencepiece", "gpt2bpe"])
def test_tokenizers_of_nemo_keep_their_ids(kind: str, tmp_path: Path) -> None:
    folder = DATA / "tokenizers" / kind
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    names = {"model": "tokenizer.model", "vocab_file": "vocab.json", "merge_file": "merges.txt"}
    section = {role: f"nemo:{name}" for role, name in names.items() if name in files}
    rows = load_tokenizer(folder).vocab_size
    raw = {"tokenizer": {"library": "sentencepiece", "type": None, **section}}
    config = small_config(vocab_size=rows + 20)
    make_nemo(tmp_path / "a.nemo", config, Variant(raw=raw, files=files))
    out = convert(tmp_path / "a.nemo", tmp_path / "out", tokenizer=TokenizerSettings("auto"))
    before, after = load_tokenizer(folder), AutoTokenizer.from_pretrained(out)
    for text in TEXTS:
        assert after.encode(text, add_special_tokens=False) == before.encode(text)
    assert json_of(out / "config.json")["vocab_size"] == rows


def test_tokenizer_and_chat_template_of_transformers(tmp_path: Path) -> None:
    """Files of a folder of transformers are copied, and come back from an export, too."""
    MODELS["llama"].make().save_pretrained(tmp_path / "hf")
    folder = DATA / "core" / "bridge031_llama31_a" / "checkpoint"
    (tokenizer_json,) = folder.rglob("tokenizer.json")
    for path in tokenizer_json.parent.iterdir():
        shutil.copy(path, tmp_path / "hf" / path.name)
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    (tmp_path / "hf" / "chat_template.jinja").write_text(template)
    config = json_of(tmp_path / "hf" / "config.json")
    rows = len(AutoTokenizer.from_pretrained(tmp_path / "hf"))
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config | {"vocab_size": rows}))
    model.save_pretrained(tmp_path / "hf")
    auto = TokenizerSettings("auto")
    out = convert(tmp_path / "hf", tmp_path / "out", tokenizer=auto)
    served = export_folder(tmp_path / "hf", tmp_path, tokenizer=auto)
    back = convert(served, tmp_path / "back", tokenizer=auto)
    before = AutoTokenizer.from_pretrained(tmp_path / "hf")
    chat = [{"role": "user", "content": "Hi"}]
    for folder in (out, back):
        after = AutoTokenizer.from_pretrained(folder)
        assert [after.encode(text) for text in TEXTS] == [before.encode(text) for text in TEXTS]
        assert after.chat_template == before.chat_template
        found = after.apply_chat_template(chat, tokenize=False)
        assert found == before.apply_chat_template(chat, tokenize=False)
    content = (tmp_path / "hf" / "tokenizer.json").read_bytes()
    assert (out / "tokenizer.json").read_bytes() == content


def test_an_existing_folder(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = convert(base, tmp_path / "out")
    before = (out / "model.safetensors").stat().st_ino
    convert(base, out)
    assert "is kept" in capsys.readouterr().out
    assert (out / "model.safetensors").stat().st_ino == before
    with pytest.raises(CheckpointError, match=r"other settings; change export\.model\.overwrite"):
        convert(base, out, "fp16")
    with pytest.raises(CheckpointError, match=r"already exists"):
        convert(base, out, "fp16", reuse=False)
    convert(base, out, "fp16", overwrite=True)
    assert {values.dtype for values in tensors(out).values()} == {np.dtype("f2")}


def test_an_interruption_leaves_no_folder(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run goes on with the shards that are complete."""
    add, names = HuggingFaceWriter.add, list[str]()

    def stopping(self: HuggingFaceWriter, entry: FileEntry) -> None:
        if len(names) == 2:
            raise KeyboardInterrupt
        add(self, entry)
        if entry.name.startswith("model-"):
            names.append(entry.name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HuggingFaceWriter, "add", stopping)
        with pytest.raises(KeyboardInterrupt):
            convert(base, tmp_path / "out", max_shard_size="10KB")
    assert not (tmp_path / "out").exists() and (tmp_path / "out.partial").is_dir()
    created: list[str] = []
    create = HuggingFaceWriter.create

    def noted(self: HuggingFaceWriter, shard: Any) -> Any:
        created.append(shard.name)
        return create(self, shard)

    monkeypatch.setattr(HuggingFaceWriter, "create", noted)
    out = convert(base, tmp_path / "out", max_shard_size="10KB")
    assert created and not {*created} & {*names}
    check_same_tensors(convert(base, tmp_path / "once"), out)
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("shard_size", ["10KB", "5GB"])
def test_digests_are_computed_beside_the_writing(
    shard_size: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (folder_module, export_module):
        monkeypatch.setattr(module, "MIN_BYTES", 0)
    out = convert(base, tmp_path / "out", max_shard_size=shard_size, digest_source=True)
    manifest = read_manifest(out)
    assert manifest is not None
    assert manifest.source[SOURCE_DIGESTS] == {str(base): source_digest(base)}
    problems = Problems("the folder")
    check_files(out, manifest.entries, problems, digests=True)
    problems.raise_if_any(CheckpointError)
    for entry in manifest.files:
        if entry.crc32 is not None:
            assert entry.crc32 == f"{zlib.crc32((out / entry.name).read_bytes()):08x}"


def test_a_full_disk_is_one_line(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder_module.os, "pwrite", full)
        with pytest.raises(CheckpointError, match=r"^cannot write .*No space left[^\n]*$"):
            convert(base, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == []
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(export_module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match=r"^[^\n]*10 bytes free[^\n]*$"):
        convert(base, tmp_path / "out")


def test_a_folder_that_cannot_be_written(base: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"^cannot write [^\n]*$"):
        convert(base, tmp_path / "file" / "out")


@pytest.mark.parametrize("size", ["0GB", "five", "5 TB"])
def test_sizes_of_shards_are_checked(base: Path, tmp_path: Path, size: str) -> None:
    with pytest.raises(ConfigError, match=r"max_shard_size is not a size; got"):
        convert(base, tmp_path / "out", max_shard_size=size)
