"""Exports of tiny transformers models: the files alone give the logits of transformers."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import T5EncoderModel

from launcher_scripts.common.errors import CheckpointError
from launcher_scripts.models.bart import NEVER
from tests.checkpoint import reference_forward_bart, reference_forward_gpt, reference_forward_t5
from tests.checkpoint.exporting import change_json, export_folder, open_weights, refused_export
from tests.checkpoint.tiny_models import DECODERS, ENCODER_DECODERS, UNTIED_DECODERS

TOLERANCE = 1e-5
IDS = torch.tensor([[5, 17, 2, 40, 66, 31, 8], [9, 3, 60, 12, 13, 14, 15]])
TARGETS = torch.tensor([[0, 9, 33, 21, 4], [0, 64, 50, 7, 7]])


def seq2seq_logits(folder: Path, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    weights, config = open_weights(folder)
    forward = {"T5Config": reference_forward_t5, "BartConfig": reference_forward_bart}
    return forward[type(config).__name__].logits(weights, config, ids, targets)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", DECODERS | UNTIED_DECODERS)
def test_decoder_logits(tmp_path: Path, name: str, tp_size: int) -> None:
    model = (DECODERS | UNTIED_DECODERS)[name].save(tmp_path / "hf")
    folder = export_folder(tmp_path / "hf", tmp_path, tp_size)
    weights, config = open_weights(folder)
    with torch.no_grad():
        expected = model(IDS).logits
    found = reference_forward_gpt.logits(weights, config, IDS)
    assert (found - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_encoder_decoder_logits(tmp_path: Path, name: str, tp_size: int) -> None:
    model = ENCODER_DECODERS[name].save(tmp_path / "hf")
    folder = export_folder(tmp_path / "hf", tmp_path, tp_size)
    with torch.no_grad():
        expected = model(input_ids=IDS, decoder_input_ids=TARGETS).logits
    found = seq2seq_logits(folder, IDS, TARGETS)
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max().clamp(min=1)


def test_a_marian_never_says_its_padding(tmp_path: Path) -> None:
    """transformers bans it as it generates, and the training had no row for it."""
    model = ENCODER_DECODERS["marian"].make()
    model.final_logits_bias.fill_(0.5)
    model.save_pretrained(tmp_path / "hf")
    weights, config = open_weights(export_folder(tmp_path / "hf", tmp_path))
    bias = weights["final_logits_bias"]
    assert bias[config.pad_id] == NEVER
    assert torch.equal(bias[: config.pad_id], torch.full((66,), 0.5))


def test_positions_that_a_file_holds_are_read(tmp_path: Path) -> None:
    """Without them they are computed, to the last bit as transformers does."""
    ENCODER_DECODERS["pegasus"].make().save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    names = [f"{side}.embed_positions.weight" for side in ("encoder", "decoder")]
    computed = {name: tensors.pop(f"model.{name}") for name in names}
    others = {name: torch.randn(20, 16) for name in names}
    for number, (stored, tables) in enumerate((({}, computed), (others, others))):
        save_file(tensors | {f"model.{name}": stored[name] for name in stored}, file)
        weights, _ = open_weights(export_folder(tmp_path / "hf", tmp_path / str(number)))
        assert all(torch.equal(weights[name], table) for name, table in tables.items())


def test_key_value_heads_are_copied_where_there_are_more_ranks(tmp_path: Path) -> None:
    model = DECODERS["llama"].save(tmp_path / "hf")
    weights, config = open_weights(export_folder(tmp_path / "hf", tmp_path, 4))
    with torch.no_grad():
        expected = model(IDS).logits
    found = reference_forward_gpt.logits(weights, config, IDS)
    assert (found - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", ["llama", "t5_v1_1"])
def test_bfloat16_files_hold_what_torch_rounds_to(tmp_path: Path, name: str) -> None:
    (DECODERS | ENCODER_DECODERS)[name].save(tmp_path / "hf")
    exact, _ = open_weights(export_folder(tmp_path / "hf", tmp_path / "fp32", 2))
    folder = export_folder(tmp_path / "hf", tmp_path / "bf16", 2, "bf16")
    rounded, _ = open_weights(folder)
    assert "weight_data_type = bf16" in (folder / "config.ini").read_text()
    for tensor in rounded.rows:
        assert torch.equal(rounded[tensor], exact[tensor].bfloat16().float()), tensor


def test_a_bfloat16_source_is_kept_bit_by_bit(tmp_path: Path) -> None:
    model = DECODERS["opt"].make().bfloat16()
    model.save_pretrained(tmp_path / "hf")
    folder = export_folder(tmp_path / "hf", tmp_path, 1, "bf16")
    stored = np.fromfile(folder / "model.layers.0.mlp.dense_h_to_4h.weight.0.bin", "<i2")
    expected = model.model.decoder.layers[0].fc1.weight.T.contiguous().view(torch.int16)
    assert np.array_equal(stored, expected.numpy().reshape(-1))


def test_values_beyond_fp16_are_refused_by_name(tmp_path: Path) -> None:
    model = DECODERS["gpt2"].make()
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight[3, 5] = -1e5
    model.save_pretrained(tmp_path / "hf")
    with pytest.raises(CheckpointError, match=r"1\.mlp\.dense_h_to_4h\.weight .*100000.*bf16"):
        export_folder(tmp_path / "hf", tmp_path, 1, "fp16")
    assert not list(tmp_path.glob("m/1/*"))


def test_sharded_and_torch_files_give_the_same_bytes(tmp_path: Path) -> None:
    model = ENCODER_DECODERS["t5_v1_0"].make()
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="5KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    for name, zipped in (("new", True), ("old", False)):
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(tmp_path / "whole" / "config.json", folder)
        # torch files keep tied tensors under every name.
        state = model.state_dict() | {"lm_head.weight": model.shared.weight}
        torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    exports = {
        name: export_folder(tmp_path / name, tmp_path / f"{name}-out", 2)
        for name in ("whole", "sharded", "new", "old")
    }
    expected = contents(exports["whole"])
    assert all(contents(folder) == expected for folder in exports.values())


def test_torch_files_in_shards(tmp_path: Path) -> None:
    model = DECODERS["bloom"].make()
    model.save_pretrained(tmp_path / "whole")
    folder = tmp_path / "sharded"
    folder.mkdir()
    shutil.copy(tmp_path / "whole" / "config.json", folder)
    names = sorted(model.transformer.state_dict())
    places = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"pytorch_model-{number}.bin"
        state = model.transformer.state_dict()
        torch.save({name: state[name] for name in part}, folder / file)
        places |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    expected = contents(export_folder(tmp_path / "whole", tmp_path / "a", 2))
    assert contents(export_folder(folder, tmp_path / "b", 2)) == expected


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".json"}


def test_tied_tensors_are_found_under_any_of_their_names(tmp_path: Path) -> None:
    model = ENCODER_DECODERS["bart"].make()
    model.save_pretrained(tmp_path / "usual")
    shutil.copytree(tmp_path / "usual", tmp_path / "other")
    state = load_file(tmp_path / "usual" / "model.safetensors")
    state["model.encoder.embed_tokens.weight"] = state.pop("model.shared.weight")
    save_file(state, tmp_path / "other" / "model.safetensors")
    usual = export_folder(tmp_path / "usual", tmp_path / "a")
    assert contents(export_folder(tmp_path / "other", tmp_path / "b")) == contents(usual)


def test_missing_unknown_and_misshapen_tensors_are_one_error(tmp_path: Path) -> None:
    DECODERS["gpt2"].make().save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    state = load_file(path)
    state["transformer.h.0.attn.extra"] = torch.ones(2)
    state["transformer.h.0.ln_1.weight"] = torch.ones(3)
    del state["transformer.ln_f.bias"]
    save_file(state, path)
    with pytest.raises(CheckpointError) as caught:
        export_folder(tmp_path / "hf", tmp_path)
    for part in ("h.0.attn.extra is a", "h.0.ln_1.weight has", "ln_f.bias is missing"):
        assert part in str(caught.value)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("name", ["gpt2_untied", "llama"])
def test_a_missing_output_table_is_not_taken_for_a_tied_one(tmp_path: Path, name: str) -> None:
    (DECODERS | UNTIED_DECODERS)[name].make().save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    state = load_file(path)
    del state["lm_head.weight"]
    save_file(state, path)
    refused_export(tmp_path / "hf", tmp_path, r"lm_head\.weight is missing, and tie_word_embedd")


@pytest.mark.parametrize(
    ("layers", "answer"),
    [
        (10**9, "n_layer or num_hidden_layers must be at most 65536"),
        (60000, "num_layers is more than there are tensors"),
    ],
)
def test_an_impossible_depth_is_one_line(tmp_path: Path, layers: int, answer: str) -> None:
    DECODERS["gpt2"].make().save_pretrained(tmp_path / "hf")
    change_json(tmp_path / "hf" / "config.json", n_layer=layers)
    message = refused_export(tmp_path / "hf", tmp_path, answer)
    assert message.count("\n") == 1


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    DECODERS["opt"].make().save_pretrained(tmp_path / "hf", max_shard_size="5KB")
    lost = sorted((tmp_path / "hf").glob("*.safetensors"))[1]
    lost.unlink()
    refused_export(tmp_path / "hf", tmp_path, f"shard is missing; got '{lost.name}'")


def test_sizes_that_do_not_divide_are_answered_with_those_that_do(tmp_path: Path) -> None:
    ENCODER_DECODERS["bart"].make().save_pretrained(tmp_path / "hf")
    refused_export(tmp_path / "hf", tmp_path, "got 4; choices: 1, 2; ", 4)


def test_the_source_can_be_named(tmp_path: Path) -> None:
    DECODERS["gpt2"].make().save_pretrained(tmp_path / "hf")
    export_folder(tmp_path / "hf", tmp_path, source="huggingface")
    refused_export(
        tmp_path / "hf", tmp_path / "b", r"must hold one model_config\.yaml", source="nemo"
    )
    refused_export(
        tmp_path / "hf",
        tmp_path / "c",
        "unknown source; got 'onnx'; choices: auto, nemo, ",
        source="onnx",
    )


def test_a_snapshot_of_the_hubs_cache_is_read_through_its_links(tmp_path: Path) -> None:
    DECODERS["gpt2"].make().save_pretrained(tmp_path / "hf")
    repository = tmp_path / "models--a--b"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, name in enumerate(("config.json", "model.safetensors")):
        shutil.move(tmp_path / "hf" / name, repository / "blobs" / str(number))
        (snapshot / name).symlink_to(Path("../../blobs") / str(number))
    assert (export_folder(snapshot, tmp_path) / "model.wte.bin").is_file()
    (tmp_path / "outside").touch()
    (snapshot / "vocab.json").symlink_to(tmp_path / "outside")
    refused_export(snapshot, tmp_path / "again", "a link leads out of the folder")


@pytest.mark.parametrize("tied", [True, False])
def test_a_umt5_as_it_was_published(tmp_path: Path, tied: bool) -> None:
    """Its config.json names a class and no model_type; it has an output table of its own."""
    model = ENCODER_DECODERS["umt5"].make()
    model.save_pretrained(tmp_path / "hf")
    expected = contents(export_folder(tmp_path / "hf", tmp_path / "a"))
    path = tmp_path / "hf" / "config.json"
    raw = json.loads(path.read_text())
    del raw["model_type"]
    weights = tmp_path / "hf" / "model.safetensors"
    if not tied:
        raw["tie_word_embeddings"] = False
        save_file(load_file(weights) | {"lm_head.weight": torch.ones(67, 16)}, weights)
    path.write_text(json.dumps(raw))
    found = contents(export_folder(tmp_path / "hf", tmp_path / "b"))
    if tied:
        assert found == expected
    else:
        assert np.unique(np.frombuffer(found["lm_head.weight.bin"], "<f4")).tolist() == [1]
        assert b"logits_scale = 1.0" in found["config.ini"]


def test_the_encoder_of_a_t5_alone_or_cut_out(tmp_path: Path) -> None:
    whole = ENCODER_DECODERS["t5_v1_1"].make()
    whole.save_pretrained(tmp_path / "whole")
    T5EncoderModel.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "encoder")
    cut = export_folder(tmp_path / "whole", tmp_path / "a", 2, encoder_only=True)
    alone = export_folder(tmp_path / "encoder", tmp_path / "b", 2)
    assert {name: data for name, data in contents(cut).items() if name != "config.ini"} == {
        name: data for name, data in contents(alone).items() if name != "config.ini"
    }
    weights, config = open_weights(alone)
    with torch.no_grad():
        expected = whole.encoder(IDS).last_hidden_state
    found = reference_forward_t5.encode(weights, config, IDS)
    assert (found - expected).abs().max() <= TOLERANCE


def test_tensors_that_old_checkpoints_carry_unused_are_left_out(tmp_path: Path) -> None:
    model = ENCODER_DECODERS["t5_v1_0"].make()
    model.save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    table = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    expected = contents(export_folder(tmp_path / "hf", tmp_path / "a"))
    save_file(load_file(path) | {table: torch.ones(8, 4)}, path)
    assert contents(export_folder(tmp_path / "hf", tmp_path / "b")) == expected
