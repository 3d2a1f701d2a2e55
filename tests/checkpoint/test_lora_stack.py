"""LoRA adapters kept beside the weights: what each adds is what merging it adds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.checkpoint.fastertransformer.manifest import read_manifest
from launcher_scripts.common.errors import CheckpointError
from launcher_scripts.contract.requests import GenerateRequest
from tests.checkpoint.engine_answers import answers
from tests.checkpoint.exporting import (
    export_folder,
    open_weights,
    refused_export,
    weight_bytes,
)
from tests.checkpoint.kept_lora import check_kept
from tests.checkpoint.peft_maker import STEM, PeftMaker
from tests.checkpoint.test_huggingface_out import check_same_tensors, convert, tensors
from tests.checkpoint.test_peft import LINEAR, MODELS

# kind -> modules of two adapters
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "llama": (LINEAR, ("q_proj", "v_proj", "down_proj")),
    "qwen2": (("q_proj", "v_proj"), ("k_proj",)),
    "gpt2": (("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"), ("c_attn",)),
    "opt": (("q_proj", "fc1", "fc2"), ("out_proj",)),
    "phi3": (("qkv_proj", "gate_up_proj"), ("o_proj", "down_proj")),
    "falcon_40b": (("query_key_value",), ("dense",)),
    "gptj": (("q_proj", "fc_in"), ("k_proj", "out_proj")),
}

FUSED = "gate_up_proj"


def peft(folder: Path, model: Any, endings: tuple[str, ...], rank: int, **config: Any) -> str:
    """An adapter of all modules that end so, with a scale of 2."""
    maker, conv = PeftMaker(model, seed=rank), bool(config.get("fan_in_fan_out"))
    for module in maker.modules(*endings):
        maker.lora(module, 2.0, rank, conv=conv, dora=bool(config.get("use_dora")))
    values = {"r": rank, "lora_alpha": 2 * rank, "target_modules": list(endings)}
    return maker.write(folder, **{**values, **config})


@pytest.mark.parametrize("kind", CASES)
def test_each_adapter_adds_what_merging_it_adds(tmp_path: Path, kind: str) -> None:
    model = MODELS[kind].save(tmp_path / "base")
    more = {"fan_in_fan_out": True} if kind == "gpt2" else {}
    adapters = tuple(
        peft(tmp_path / name, model, endings, rank, **more)
        for name, endings, rank in zip(("sql", "law"), CASES[kind], (4, 2), strict=True)
    )
    merged = [
        open_weights(
            export_folder(tmp_path / "base", tmp_path / f"{at}", adapter_checkpoints=(adapter,))
        )[0]
        for at, adapter in enumerate(adapters)
    ]
    config = check_kept(tmp_path / "base", tmp_path / "kept", adapters, merged)
    assert (config.parts.lora_names, config.parts.lora_rank) == (("sql", "law"), 4)


def with_peft(model: dict[str, np.ndarray], folder: Path) -> dict[str, np.ndarray]:
    """The model with an adapter as PEFT merges it: W + alpha / r * B @ A."""
    config = json.loads((folder / "adapter_config.json").read_text())
    found = load_file(folder / "adapter_model.safetensors")
    modules = {name.split(".lora_")[0].removeprefix(STEM) for name in found}
    assert modules == {*config["target_modules"]} and len(found) == 2 * len(modules)
    merged = dict(model)
    for module in modules:
        down, up = (found[f"{STEM}{module}.lora_{side}.weight"] for side in "AB")
        rank, alpha = (
            config[f"{name}_pattern"].get(module, config[key])
            for name, key in (("rank", "r"), ("alpha", "lora_alpha"))
        )
        assert len(down) == rank
        update = alpha / rank * (up @ down)
        merged[f"{module}.weight"] = model[f"{module}.weight"] + (
            update.T if config["fan_in_fan_out"] else update
        )
    return merged


@pytest.mark.parametrize("kind", CASES)
def test_adapters_beside_a_transformers_folder(tmp_path: Path, kind: str) -> None:
    model, makers = MODELS[kind].save(tmp_path / "base"), {}
    conv = kind == "gpt2"
    for name, endings, rank in zip(("sql", "law"), CASES[kind], (4, 2), strict=True):
        endings = tuple(ending for ending in endings if ending != FUSED)
        makers[name] = maker = PeftMaker(model, seed=rank)
        for module in maker.modules(*endings):
            maker.lora(module, 2.0, rank, conv=conv)
        values = {"r": rank, "lora_alpha": 2 * rank, "target_modules": list(endings)}
        maker.write(tmp_path / name, **values, fan_in_fan_out=conv)
    paths = tuple(str(tmp_path / name) for name in makers)
    out = convert(tmp_path / "base", tmp_path / "out", lora_checkpoints=paths)
    check_same_tensors(tmp_path / "base", out)
    manifest = read_manifest(out)
    assert manifest is not None
    for name, maker in makers.items():
        merged = with_peft(tensors(out), out / "adapters" / name)
        for key, values in merged.items():
            np.testing.assert_allclose(values, maker.merged[key], rtol=0, atol=1e-5, err_msg=key)
        assert f"adapters/{name}/adapter_model.safetensors" in manifest.entries
        again = (str(out / "adapters" / name),)
        back = tensors(convert(out, tmp_path / name / "merged", adapter_checkpoints=again))
        for key, values in merged.items():
            np.testing.assert_allclose(back[key], values, rtol=0, atol=1e-6, err_msg=key)


def test_rows_of_two_projections_in_one_module_are_refused(tmp_path: Path) -> None:
    adapter = peft(tmp_path / "sql", MODELS["phi3"].save(tmp_path / "base"), (FUSED,), 2)
    with pytest.raises(CheckpointError, match=r"as PEFT:\n- LoRA of .* no place; .*, which merges"):
        convert(tmp_path / "base", tmp_path / "out", lora_checkpoints=(adapter,))
    assert not (tmp_path / "out").exists()


def test_nemos_adapter_gives_its_logits_in_transformers(shared_dir: Path, tmp_path: Path) -> None:
    nemo = shared_dir / "fixtures" / "nemo"
    adapter = nemo / "peft_gpt_lora_nemo1.23.0"
    base = json.loads((adapter / "MANIFEST.json").read_text())["base_model_fixture"]
    paths = (str(adapter / "model.nemo"),)
    out = convert(nemo / base / "model.nemo", tmp_path / "out", "fp32", lora_checkpoints=paths)
    (folder,) = (out / "adapters").iterdir()
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    merged = with_peft(tensors(out), folder)
    model.load_state_dict({key: torch.from_numpy(v) for key, v in merged.items()}, strict=False)
    with np.load(adapter / "reference.npz") as file, torch.no_grad():
        found = model(torch.from_numpy(file["tokens"])).logits.numpy()
        expected = file["logits"][..., : found.shape[-1]]
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_engine_answers_as_with_merged_weights(tmp_path: Path, tp: int) -> None:
    model = MODELS["llama"].save(tmp_path / "base")
    adapters = tuple(
        peft(tmp_path / name, model, endings, rank)
        for name, endings, rank in zip(("sql", "law"), CASES["llama"], (4, 2), strict=True)
    )
    kept = export_folder(
        tmp_path / "base", tmp_path / "kept", tp, lora_checkpoints=adapters, verify=True
    )
    manifest = read_manifest(kept)
    assert manifest is not None
    assert manifest.source["adapters"]["lora"] == list(adapters)
    logits = prompt_logits(kept, (None, 0, 1), tp)
    for number, paths in enumerate(((), *((path,) for path in adapters))):
        folder = export_folder(tmp_path / "base", tmp_path / f"{number}", adapter_checkpoints=paths)
        (expected,) = prompt_logits(folder, (None,))
        np.testing.assert_allclose(logits[number], expected, rtol=0, atol=2e-4)


def test_another_list_of_adapters_keeps_the_weights(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = MODELS["llama"].save(tmp_path / "base")
    sql, law = (peft(tmp_path / name, model, CASES["llama"][0], 2) for name in ("sql", "law"))
    folder = export_folder(tmp_path / "base", tmp_path / "out")
    plain = inodes(folder)
    for adapters in ((sql,), (sql, law), ()):
        assert export_folder(tmp_path / "base", tmp_path / "out", lora_checkpoints=adapters)
        assert "only LoRA adapters differ" in capfd.readouterr().out
        assert plain.items() <= inodes(folder).items()
        fresh = export_folder(tmp_path / "base", tmp_path / "new", lora_checkpoints=adapters)
        assert weight_bytes(folder) == weight_bytes(fresh)
        FTCheckpoint.open(folder)
        shutil.rmtree(fresh)
    (tmp_path / "base" / "config.json").touch()
    with pytest.raises(CheckpointError, match="it is of another checkpoint"):
        export_folder(tmp_path / "base", tmp_path / "out", lora_checkpoints=(sql,))
    assert inodes(folder) == plain


def inodes(folder: Path) -> dict[str, int]:
    """Name -> inode of every weight: another one is a file that was written again."""
    return {path.name: path.stat().st_ino for path in folder.glob("*.bin")}


def prompt_logits(folder: Path, adapters: tuple[int | None, ...], tp: int = 1) -> list[Any]:
    """The logits of a prompt with each of the adapters."""
    ids = (3, 1, 4, 1, 5, 9, 2, 6)
    rows = [
        GenerateRequest(ids, 0, lora_adapter=adapter, return_context_logits=True)
        for adapter in adapters
    ]
    return [each.context_logits for each in answers(folder, *rows, tp_size=tp)]


@pytest.mark.parametrize(
    ("endings", "config", "words"),
    [
        (
            ("q_proj",),
            {"use_dora": True},
            r"learned for layers\.0\.self_attn\.q_proj\.weight can only be merged; change "
            r".*export\.model\.adapter_checkpoints",
        ),
        (("embed_tokens",), {"target_modules": []}, r"embed_tokens\.weight can only be merged"),
        (("q_proj",), {"target_modules": ["k_proj"]}, r"k_proj is missing"),
    ],
)
def test_what_can_only_be_merged_is_refused(
    tmp_path: Path, endings: tuple[str, ...], config: dict[str, Any], words: str
) -> None:
    model = MODELS["llama"].save(tmp_path / "base")
    maker = PeftMaker(model)
    if endings == ("embed_tokens",):
        maker.embedding("model.embed_tokens", 2.0)
        adapter = maker.write(tmp_path / "sql", target_modules=["embed_tokens"])
    else:
        adapter = peft(tmp_path / "sql", model, endings, 4, **config)
    refused_export(tmp_path / "base", tmp_path, words, lora_checkpoints=(adapter,))


def test_two_adapters_of_one_name_are_refused(tmp_path: Path) -> None:
    model = MODELS["llama"].save(tmp_path / "base")
    paths = tuple(peft(tmp_path / at / "sql", model, ("q_proj",), 4) for at in "ab")
    refused_export(tmp_path / "base", tmp_path, "one name", lora_checkpoints=paths)


def test_a_t5_s_adapters_can_only_be_merged(tmp_path: Path) -> None:
    model = MODELS["t5"].save(tmp_path / "base")
    adapter = peft(tmp_path / "sql", model, (".q",), 4, target_modules=["q"])
    words = "LoRA of this family can only be merged; got 't5'"
    refused_export(tmp_path / "base", tmp_path, words, lora_checkpoints=(adapter,))
