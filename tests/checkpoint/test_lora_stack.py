"""LoRA adapters kept beside the weights: what each adds is what merging it adds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
from tests.checkpoint.peft_maker import PeftMaker
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
