"""The .nemo writer against a file that NeMo 1.23 wrote."""

from __future__ import annotations

import io
import json
import pickletools
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from launcher_scripts.checkpoint.sources.nemo_writer import (
    Weight,
    artifact_name,
    stacked_tensors,
    write_nemo,
)
from launcher_scripts.common.errors import CheckpointError
from tests.quickstart.make_layout import layout, read_members

FIXTURE = Path("fixtures") / "nemo" / "mcore_gpt_rope_swiglu_gqa_nemo1.23.0" / "model.nemo"
LAYERS = 2


@pytest.fixture(scope="module")
def genuine(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The layout of a file that NeMo wrote."""
    data_dir: Path = request.getfixturevalue("data_dir")
    parsed: dict[str, Any] = json.loads((data_dir / "nemo_mcore_gpt_layout.json").read_text())
    return parsed


def _weight(array: np.ndarray) -> Weight:
    return Weight(array.shape, lambda: array)


def _random_weights() -> dict[str, Weight]:
    """A state dict with the fixture's shapes: hidden 64, 4 heads of 16, 2 groups, ffn 176."""
    generator = np.random.default_rng(3)

    def random(*shape: int) -> Weight:
        return _weight(generator.standard_normal(shape, dtype=np.float32))

    weights = {
        "embedding.word_embeddings.weight": random(256, 64),
        "decoder.final_layernorm.weight": random(64),
        "output_layer.weight": random(256, 64),
    }
    for layer in range(LAYERS):
        weights |= {
            f"decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_weight": random(64),
            f"decoder.layers.{layer}.self_attention.linear_qkv.weight": random(128, 64),
            f"decoder.layers.{layer}.self_attention.linear_proj.weight": random(64, 64),
            f"decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight": random(64),
            f"decoder.layers.{layer}.mlp.linear_fc1.weight": random(352, 64),
            f"decoder.layers.{layer}.mlp.linear_fc2.weight": random(64, 176),
        }
    return weights


def _write(path: Path, weights: dict[str, Weight], genuine: dict[str, Any], **more: Any) -> Path:
    name = genuine["config"]["tokenizer"]["model"].removeprefix("nemo:")
    size = dict(genuine["members"])[f"./{name}"]
    tensors = stacked_tensors(weights, gated=True)
    write_nemo(path, genuine["config"], tensors, {name: b"x" * size}, **more)
    return path


def test_members_and_texts_are_those_that_nemo_writes(
    tmp_path: Path, genuine: dict[str, Any]
) -> None:
    written = layout(_write(tmp_path / "ours.nemo", _random_weights(), genuine))
    assert written["members"] == genuine["members"]
    assert written["texts"] == genuine["texts"]
    assert written["config"] == genuine["config"]


def test_chunks_hold_one_layer_and_one_half_of_a_gated_layer(
    tmp_path: Path, genuine: dict[str, Any]
) -> None:
    weights = _random_weights()
    members = read_members(_write(tmp_path / "ours.nemo", weights, genuine))
    folder = "./model_weights/model.decoder.layers.mlp.linear_fc1.weight"
    fc1 = weights["decoder.layers.1.mlp.linear_fc1.weight"].read()
    assert members[f"{folder}/1.0.0"] == fc1[:176].tobytes()
    assert members[f"{folder}/1.1.0"] == fc1[176:].tobytes()


def test_every_byte_of_the_weights_is_what_nemo_wrote(
    tmp_path: Path, shared_dir: Path, genuine: dict[str, Any]
) -> None:
    theirs = read_members(shared_dir / FIXTURE)
    ours = read_members(_write(tmp_path / "ours.nemo", _weights_of(theirs), genuine))
    assert ours.keys() == theirs.keys()
    for name, content in theirs.items():
        if name.startswith("./model_weights") and not name.endswith(".pt"):
            assert ours[name] == content, name
        elif content is not None and name.endswith(".pt"):
            assert _operations(ours[name]) == _operations(content), name


def _weights_of(members: dict[str, bytes | None]) -> dict[str, Weight]:
    """The state dict inside a distributed checkpoint, read the plain way."""
    root = "./model_weights/model."
    weights = {}
    for name, content in members.items():
        if not name.startswith(root) or not name.endswith("/.zarray") or content is None:
            continue
        header = json.loads(content)
        key = name.removeprefix(root).removesuffix("/.zarray")
        chunks = [
            np.frombuffer(value, header["dtype"])
            for path, value in members.items()
            if value is not None and path.startswith(f"{root}{key}/") and path != name
        ]
        array = np.concatenate(chunks).reshape(header["shape"])
        if key.startswith("decoder.layers."):
            rest = key.removeprefix("decoder.layers.")
            weights |= {f"decoder.layers.{i}.{rest}": _weight(row) for i, row in enumerate(array)}
        else:
            weights[key] = _weight(array)
    return weights


def _operations(content: bytes | None) -> list[tuple[str, object]]:
    """The pickle in a torch.save file: its operations, and what the import ones name."""
    with zipfile.ZipFile(io.BytesIO(content or b"")) as archive:
        pickled = archive.read(next(n for n in archive.namelist() if n.endswith("/data.pkl")))
    return [
        (operation.name, argument if operation.name == "GLOBAL" else None)
        for operation, argument, _ in pickletools.genops(pickled)
    ]


def test_torch_reads_its_files(tmp_path: Path, genuine: dict[str, Any]) -> None:
    members = read_members(_write(tmp_path / "ours.nemo", _random_weights(), genuine))
    common = torch.load(io.BytesIO(members["./model_weights/common.pt"] or b""), weights_only=True)
    assert common == {}
    folder = "./model_weights/model.decoder.layers.mlp.linear_fc1._extra_state"
    state = members[f"{folder}/shard_1_2.pt"] or b""
    # A pickled io.BytesIO, as Transformer Engine leaves it: not among torch's safe types.
    inner = torch.load(io.BytesIO(state), weights_only=False)
    assert isinstance(inner, io.BytesIO)
    inner.seek(0)
    assert torch.load(inner, weights_only=True) is None


def test_an_existing_file_is_kept_unless_asked(tmp_path: Path, genuine: dict[str, Any]) -> None:
    path = _write(tmp_path / "ours.nemo", _random_weights(), genuine)
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="exists already"):
        _write(path, _random_weights(), genuine)
    assert path.read_bytes() == before
    _write(path, _random_weights(), genuine, overwrite=True)


def test_a_failing_write_leaves_nothing(tmp_path: Path, genuine: dict[str, Any]) -> None:
    weights = _random_weights()
    weights["output_layer.weight"] = Weight((256, 64), lambda: np.zeros((3, 64), np.float32))
    with pytest.raises(CheckpointError, match=r"model\.output_layer\.weight has another shape"):
        _write(tmp_path / "ours.nemo", weights, genuine)
    assert list(tmp_path.iterdir()) == []


def test_all_missing_layers_are_named_at_once() -> None:
    weights = _random_weights()
    del weights["decoder.layers.0.mlp.linear_fc2.weight"]
    del weights["decoder.layers.1.self_attention.linear_qkv.weight"]
    weights["decoder.layers.1.self_attention.linear_proj.weight"] = _weight(np.zeros((2, 2)))
    with pytest.raises(CheckpointError, match="3 problems") as caught:
        stacked_tensors(weights, gated=True)
    assert "mlp.linear_fc2.weight is missing for layers [0]" in str(caught.value)
    assert "linear_qkv.weight is missing for layers [1]" in str(caught.value)
    assert "linear_proj.weight differs between layers" in str(caught.value)


def test_artifact_names_are_nemos() -> None:
    name = artifact_name("tokenizer.json", b"{}")
    digits, _, own = name.partition("_")
    assert own == "tokenizer.json"
    assert len(digits) == 32
    assert set(digits) <= set("0123456789abcdef")


def test_the_configuration_has_the_keys_that_nemo_writes(genuine: dict[str, Any]) -> None:
    from launcher_scripts.checkpoint.sources.nemo_writer import CONFIG

    ours = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    # NeMo 1.23 reads rotary_base and writes it only where it was given.
    assert ours.keys() - genuine["config"].keys() == {"rotary_base"}
    assert genuine["config"].keys() - ours.keys() == set()
    for section in ("tokenizer", "data", "optim", "nsys_profile"):
        assert ours[section].keys() == genuine["config"][section].keys()
