"""Megatron-LM checkpoints: every version and cut gives the same files."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher_scripts.checkpoint.export import open_source
from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.contract.requests import GenerateRequest
from tests.checkpoint import reference_forward_gpt
from tests.checkpoint.engine_answers import answers
from tests.checkpoint.exporting import export_folder, open_weights, refused_export, weight_bytes
from tests.checkpoint.golden_cases import differing_keys, digests, found_digests
from tests.checkpoint.megatron_maker import HEADS, HIDDEN, SIZE, VOCAB, Maker, state_dict


@pytest.mark.parametrize("case", ["megatron_v0_tp1_to2", "megatron_v3_tp1_to2"])
def test_the_originals_bytes_and_keys(case: str, data_dir: Path, tmp_path: Path) -> None:
    original = data_dir / "golden" / case
    folder = export_folder(original / "ck", tmp_path, 2, num_attention_heads=4)
    assert found_digests(folder) == digests(original)
    assert differing_keys(original, folder) == {}


@pytest.mark.parametrize("version", [0, 1, 2, 3])
@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (2, 1), (2, 2)])
def test_every_version_and_cut_gives_the_same_files(
    tmp_path: Path, version: int, tp_size: int, pp_size: int
) -> None:
    plain = export_folder(Maker().write(tmp_path / "plain"), tmp_path / "a", 2)
    source = Maker(version, tp_size, pp_size).write(tmp_path / "source")
    other = export_folder(source, tmp_path / "b", 2, num_attention_heads=HEADS)
    assert weight_bytes(other) == weight_bytes(plain)


NORMS = {
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "post_attention_norm",
    "final_layernorm": "final_norm",
}


@pytest.mark.parametrize("case", [{"file": "model_rng.pt"}, {"renamed": NORMS}])
def test_files_and_names_of_other_releases(tmp_path: Path, case: dict[str, Any]) -> None:
    plain = export_folder(Maker().write(tmp_path / "plain"), tmp_path / "a")
    source = Maker(tp_size=2, pp_size=2, **case).write(tmp_path / "source")
    (source / "mp_rank_00_000_000").mkdir()
    torch.save({"optimizer": {}}, source / "mp_rank_00_000_000" / "optim.pt")
    assert weight_bytes(export_folder(source, tmp_path / "b")) == weight_bytes(plain)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_heads_that_share_keys_and_values(tmp_path: Path, tp_size: int) -> None:
    args = {"group_query_attention": True, "num_query_groups": 2}
    source = Maker(tp_size=tp_size, args=args).write(tmp_path / "source")
    weights, config = open_weights(export_folder(source, tmp_path))
    name = "attention.query_key_value.weight"
    stored = state_dict(groups=2)[f"encoder.layers.1.self_{name}"]
    query, key, value = stored.reshape(2, -1, SIZE, HIDDEN).split((HEADS // 2, 1, 1), dim=1)
    expected = torch.cat([part.reshape(-1, HIDDEN) for part in (query, key, value)]).T
    assert config.num_kv_heads == 2
    assert torch.equal(torch.as_tensor(weights[f"layers.1.{name}"]), expected)


@pytest.mark.parametrize(
    ("args", "fields"),
    [
        ({"onnx_safe": True}, {"activation": "gelu_erf"}),
        ({"bias_gelu_fusion": False, "openai_gelu": True}, {"activation": "gelu"}),
        ({"rotary_base": 500000, "use_rope_scaling": True}, {"rotary_base": 10000.0}),
    ],
)
def test_the_older_code_decides(
    tmp_path: Path, args: dict[str, Any], fields: dict[str, Any]
) -> None:
    rope = {"position_embedding_type": "rope"} if "rotary_base" in args else {}
    source = Maker(args=args | rope).write(tmp_path / "source")
    for path in source.rglob("*.pt") if rope else ():
        loaded = torch.load(path, weights_only=False)
        del loaded["model"]["language_model"]["embedding"]["position_embeddings"]
        torch.save(loaded, path)
    checkpoint = open_source(Archive(source))
    assert {name: getattr(checkpoint.config, name) for name in fields} == fields
    assert checkpoint.config.rotary_scaling != "llama3"
    assert len(checkpoint.notes) == len(rope)


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(
    version=st.integers(0, 3),
    source=st.sampled_from([(1, 1), (2, 1), (4, 1), (1, 2), (2, 4)]),
    target=st.sampled_from([1, 2, 4]),
    data_type=st.sampled_from(["fp32", "fp16", "bf16"]),
)
def test_tensors_survive_any_cut(
    tmp_path_factory: pytest.TempPathFactory,
    version: int,
    source: tuple[int, int],
    target: int,
    data_type: str,
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    checkpoint = Maker(version, *source).write(folder / "source")
    exported = export_folder(checkpoint, folder, target, data_type, num_attention_heads=HEADS)
    weights, _ = open_weights(exported)
    state = state_dict()
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[data_type]
    for layer in range(4):
        source_qkv = state[f"encoder.layers.{layer}.self_attention.query_key_value.weight"]
        qkv = source_qkv.reshape(HEADS, 3, SIZE, -1).permute(1, 0, 2, 3).flatten(0, 2).T
        found = weights[f"layers.{layer}.attention.query_key_value.weight"]
        assert torch.equal(found, qkv.to(dtype).float())
        down = state[f"encoder.layers.{layer}.mlp.dense_4h_to_h.weight"].T
        assert torch.equal(weights[f"layers.{layer}.mlp.dense_4h_to_h.weight"], down.to(dtype))
    table = state["embedding.word_embeddings.weight"]
    assert torch.equal(weights["wte"], table.to(dtype).float())
    shutil.rmtree(folder)


def test_arguments_become_hyperparameters_and_args_txt(tmp_path: Path) -> None:
    args = {"layernorm_epsilon": 1e-4, "bias_gelu_fusion": False, "lr": 0.5}
    folder = export_folder(Maker(args=args).write(tmp_path / "source"), tmp_path)
    config = FTCheckpoint.open(folder).config
    assert (config.norm_eps, config.activation, config.ffn_size) == (1e-4, "gelu_erf", 32)
    lines = (folder / "args.txt").read_text().splitlines()
    assert {"num_layers:4", "lr:0.5", "bias_gelu_fusion:False"} <= set(lines)
    assert not any(line.startswith("params_dtype") for line in lines)


def test_ids_of_the_trainings_padding_are_tokens_like_others(tmp_path: Path) -> None:
    """As in FasterTransformer, which masks only the rows that it pads itself."""
    source = Maker(args={"vocab_size": 30}).write(tmp_path / "source")
    padding = range(30, VOCAB)
    request = partial(GenerateRequest, (3,), 4, end_id=VOCAB, return_context_logits=True)
    favoured, forbidden = answers(
        export_folder(source, tmp_path),
        request(logit_bias=tuple((token, 1e3) for token in padding)),
        request(bad_words=tuple((token,) for token in padding)),
    )
    assert set(favoured.output_ids) <= set(padding)
    assert set(forbidden.output_ids) <= set(range(30))
    assert [len(logits) for logits in favoured.context_logits] == [VOCAB]


def test_swiglu_halves_are_told_apart_on_every_rank(tmp_path: Path) -> None:
    args = {"swiglu": True}
    one = export_folder(Maker(args=args).write(tmp_path / "one"), tmp_path / "a", 2)
    two = export_folder(Maker(3, 2, 1, args).write(tmp_path / "two"), tmp_path / "b", 2)
    assert weight_bytes(one) == weight_bytes(two)
    fused = state_dict(gated=True)["encoder.layers.1.mlp.dense_h_to_4h.weight"]
    weights, _ = open_weights(one)
    assert torch.equal(weights["layers.1.mlp.dense_h_to_4h.weight"], fused[:32].T)
    assert torch.equal(weights["layers.1.mlp.dense_h_to_4h_2.weight"], fused[32:].T)


def test_version_0_and_its_sharded_form_compute_the_same(tmp_path: Path) -> None:
    ids = torch.tensor([[3, 9, 27, 1]])
    found = []
    for name, maker in (("a", Maker(0)), ("b", Maker(0, 4))):
        source = maker.write(tmp_path / name / "source")
        folder = export_folder(source, tmp_path / name, 1, num_attention_heads=HEADS)
        found.append(reference_forward_gpt.logits(*open_weights(folder), ids))
    assert torch.equal(*found)
    assert found[0].abs().max() > 0.1


def test_heads_that_no_tensor_shows_are_asked_for(tmp_path: Path) -> None:
    source = Maker(0).write(tmp_path / "source")
    refused_export(source, tmp_path, r"change export\.model\.num_attention_heads")


def test_heads_that_contradict_the_checkpoint_are_refused(tmp_path: Path) -> None:
    source = Maker().write(tmp_path / "source")
    refused_export(source, tmp_path, "got 8; choices: 4", num_attention_heads=8)


def test_the_tracker_file_chooses_among_iterations(tmp_path: Path) -> None:
    source = tmp_path / "source"
    Maker().write(source / "iter_0000100")
    Maker(args={"layernorm_epsilon": 3e-5}).write(source / "iter_0000200")
    refused_export(source, tmp_path, "must hold one checkpoint")
    (source / "latest_checkpointed_iteration.txt").write_text("200\n")
    assert FTCheckpoint.open(export_folder(source, tmp_path)).config.norm_eps == 3e-5


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"num_experts": 4}, "num_experts is not supported; got 4"),
        ({"position_embedding_type": "xpos"}, "position_embedding_type is not supported"),
        ({"hidden_size": None}, "hidden_size must be a positive number"),
    ],
)
def test_arguments_no_family_knows_are_refused(
    tmp_path: Path, args: dict[str, object], message: str
) -> None:
    refused_export(Maker(args=args).write(tmp_path / "source"), tmp_path, message)


def test_ranks_of_several_saves_are_refused(tmp_path: Path) -> None:
    source = Maker(tp_size=2).write(tmp_path / "source")
    path = source / "mp_rank_01" / "model_optim_rng.pt"
    torch.save(torch.load(path, weights_only=False) | {"iteration": 8}, path)
    refused_export(source, tmp_path, "are of several saves: iteration")


def test_a_bert_is_no_gpt(tmp_path: Path) -> None:
    source = Maker().write(tmp_path / "source")
    path = next(source.rglob("model_optim_rng.pt"))
    loaded = torch.load(path, weights_only=False)
    loaded["model"]["lm_head"] = {"bias": torch.zeros(VOCAB)}
    torch.save(loaded, path)
    refused_export(source, tmp_path, r"more than a language model; got \['lm_head'\]")


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    source = Maker(tp_size=2, pp_size=2).write(tmp_path / "source")
    shutil.rmtree(source / "mp_rank_01_000")
    refused_export(source, tmp_path, "tensor-parallel rank 1, stage 0 is missing")


class Malicious:
    def __reduce__(self) -> object:
        return (exec, ("print('this ran')",))


def test_a_pickle_can_run_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = Maker().write(tmp_path / "source")
    path = source / "mp_rank_00" / "model_optim_rng.pt"
    loaded = torch.load(path, weights_only=False)
    torch.save(loaded | {"callback": Malicious()}, path)
    refused_export(source, tmp_path, r"names .*exec, which only an attack needs")
    assert "this ran" not in capsys.readouterr().out


def test_the_numpy_state_of_a_training_is_skipped(tmp_path: Path) -> None:
    source = Maker().write(tmp_path / "source")
    loaded = torch.load(source / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)
    assert isinstance(loaded["rng_state"][0]["np_rng_state"][1], np.ndarray)
    export_folder(source, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checkpoint_version": "x"}, "unknown version; got 'x'"),
        ({"checkpoint_version": float("nan")}, "unknown version; got nan"),
        ({"checkpoint_version": 1.5}, "unknown version; got 1.5"),
        ({"model": {"language_model": None}}, "holds no language model"),
        ({"model": None}, "holds no model"),
    ],
)
def test_a_damaged_top_level(tmp_path: Path, change: dict[str, object], message: str) -> None:
    source = Maker().write(tmp_path / "source")
    path = next(source.rglob("model_optim_rng.pt"))
    torch.save({**torch.load(path, weights_only=False), **change}, path)
    refused_export(source, tmp_path, message)
