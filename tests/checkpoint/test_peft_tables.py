"""PEFT adapters that bring tables of the vocabulary: trained apart from a tied one, or resized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.checkpoint import reference_forward_gpt
from tests.checkpoint.exporting import export_folder, open_weights, refused_export
from tests.checkpoint.peft_maker import STEM, PeftMaker
from tests.checkpoint.tiny_models import DECODERS, LLAMA
from tests.checkpoint_maker import make_nemo, small_config

EMBED, HEAD = "model.embed_tokens", "lm_head"
SIZE = LLAMA["hidden_size"]


class TableMaker(PeftMaker):
    """An adapter of a Llama with LoRA of one layer."""

    def __init__(self, folder: Path, tied: bool, *, equal: bool = False) -> None:
        torch.manual_seed(2)
        self.config = {**LLAMA, "tie_word_embeddings": tied}
        model = LlamaForCausalLM(LlamaConfig(**self.config))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.05, 0.3)
            if equal:
                model.lm_head.weight.copy_(model.model.embed_tokens.weight)
        model.save_pretrained(folder)
        super().__init__(model)
        self.lora("model.layers.0.self_attn.q_proj", 2.0)

    def table(self, *modules: str, rows: int = 67, stored: str = "{}.weight") -> None:
        """The same values for all modules."""
        values = self.random(rows, SIZE)
        for module in modules:
            self.tensors[STEM + stored.format(module)] = values.clone()
            self.merged[f"{module}.weight"] = values

    def expected(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the merged model, whose tables are two."""
        rows = len(self.merged[f"{EMBED}.weight"])
        config = LlamaConfig(**{**self.config, "tie_word_embeddings": False, "vocab_size": rows})
        model = LlamaForCausalLM(config).eval()
        model.load_state_dict(self.merged)
        with torch.no_grad():
            return model(ids).logits


def check(made: TableMaker, tmp_path: Path, tied: bool, **config: Any) -> None:
    said = {"target_modules": ["q_proj"], "layers_to_transform": [0], **config}
    adapter = made.write(tmp_path / "adapter", **said)
    for tp_size in (1, 2):
        folder = export_folder(
            tmp_path / "hf", tmp_path / f"tp{tp_size}", tp_size, adapter_checkpoints=(adapter,)
        )
        weights, found = open_weights(folder)
        assert found.tied_embeddings is tied
        ids = torch.tensor([[5, 17, 2, 40, len(made.merged[f"{EMBED}.weight"]) - 1]])
        logits = reference_forward_gpt.logits(weights, found, ids)
        torch.testing.assert_close(logits, made.expected(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("trained", [(EMBED,), (HEAD,), (EMBED, HEAD)])
def test_tables_of_a_tied_base_that_were_trained_apart(trained: Any, tmp_path: Path) -> None:
    made = TableMaker(tmp_path / "hf", tied=True)
    for module in trained:
        made.table(module)
    check(made, tmp_path, tied=False, modules_to_save=[each.split(".")[-1] for each in trained])


def test_tables_of_a_tied_base_that_were_trained_as_one(tmp_path: Path) -> None:
    made = TableMaker(tmp_path / "hf", tied=True)
    made.table(EMBED, HEAD)
    names = ["embed_tokens", "lm_head"]
    check(made, tmp_path, tied=True, modules_to_save=names, ensure_weight_tying=True)


@pytest.mark.parametrize("rows", [70, 60])
@pytest.mark.parametrize("tied", [True, False])
def test_a_resized_vocabulary(
    tied: bool, rows: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = TableMaker(tmp_path / "hf", tied)
    if tied:
        made.table(EMBED, HEAD, rows=rows)
    else:
        made.table(EMBED, rows=rows, stored="{}.base_layer.weight")
        made.table(HEAD, rows=rows)
    check(made, tmp_path, tied)
    assert "export.model.tokenizer" in capsys.readouterr().out


def test_a_vocabulary_of_which_one_table_was_resized(tmp_path: Path) -> None:
    made = TableMaker(tmp_path / "hf", tied=False)
    made.table(EMBED, rows=70)
    adapter = made.write(tmp_path / "adapter")
    text = refused_export(tmp_path / "hf", tmp_path, "lm_head", adapter_checkpoints=(adapter,))
    assert "got [(67, 16)]; choices: what makes (70, 16)" in text
    made.table(HEAD, rows=71)
    other = made.write(tmp_path / "other")
    refused_export(tmp_path / "hf", tmp_path, "different rows", adapter_checkpoints=(other,))


def test_two_adapters_with_tables(tmp_path: Path) -> None:
    made = TableMaker(tmp_path / "hf", tied=True)
    made.table(EMBED)
    adapters = tuple(made.write(tmp_path / name) for name in ("a", "b"))
    refused_export(
        tmp_path / "hf", tmp_path, r"two adapters bring wte", adapter_checkpoints=adapters
    )
    refused_export(tmp_path / "hf", tmp_path, "can only be merged", lora_checkpoints=adapters[:1])


def test_lora_of_a_head_that_equals_the_embedding(tmp_path: Path) -> None:
    """The base says that its tables are two."""
    made = TableMaker(tmp_path / "hf", tied=False, equal=True)
    made.lora(HEAD, 2.0)
    check(made, tmp_path, tied=False, target_modules=["q_proj", "lm_head"])


@pytest.mark.parametrize("bias", ["lora_only", "all"])
def test_biases_of_a_base_without_any(bias: str, tmp_path: Path) -> None:
    check(TableMaker(tmp_path / "hf", tied=True), tmp_path, tied=True, bias=bias)


@pytest.mark.parametrize("bias", ["lora_only", "all"])
def test_biases_that_the_base_has_and_the_file_has_not(bias: str, tmp_path: Path) -> None:
    model = DECODERS["qwen2"].save(tmp_path / "hf")
    made = PeftMaker(model)
    made.lora("model.layers.0.self_attn.q_proj", 2.0)
    adapter = made.write(tmp_path / "adapter", bias=bias)
    text = "biases were trained and are not in the file"
    refused_export(tmp_path / "hf", tmp_path, text, adapter_checkpoints=(adapter,))


def test_tables_on_a_base_of_another_maker(tmp_path: Path) -> None:
    make_nemo(tmp_path / "a.nemo", small_config())
    _, plain = open_weights(export_folder(tmp_path / "a.nemo", tmp_path / "plain"))
    made = TableMaker(tmp_path / "hf", tied=True)
    made.tensors.clear()
    values = made.random(plain.vocab_size + 2, plain.hidden_size)
    made.tensors[f"{STEM}transformer.wte.weight"] = values
    made.tensors[f"{STEM}lm_head.weight"] = values + 1
    adapter = made.write(tmp_path / "adapter")
    folder = export_folder(tmp_path / "a.nemo", tmp_path / "b", adapter_checkpoints=(adapter,))
    weights, config = open_weights(folder)
    assert (config.vocab_size, config.tied_embeddings) == (plain.vocab_size + 2, False)
    assert torch.equal(weights["wte"], values)
    assert torch.equal(weights["lm_head.weight"], values + 1)
