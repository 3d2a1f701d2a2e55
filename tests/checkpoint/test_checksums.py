"""Altered bytes of a checkpoint are found by the CRC-32 that its files hold."""

from pathlib import Path

import numpy as np
import pytest
import torch

from launcher_scripts.checkpoint.formats import torch_file
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.sources.nemo_adapters import read_parts
from launcher_scripts.common.errors import CheckpointError
from tests.checkpoint.exporting import export_folder, refused_export
from tests.checkpoint.parts_maker import write_parts
from tests.checkpoint.tiny_models import DECODERS
from tests.checkpoint_maker import Variant, make_nemo, small_config


def flip(path: Path, values: np.ndarray) -> None:
    """Turn one bit in the middle of where `values` lie in the file."""
    content = bytearray(path.read_bytes())
    data = np.ascontiguousarray(values).tobytes()
    at = content.index(data) + len(data) // 2
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("form", ["nemo", "torch_dist"])
def test_an_altered_tensor_is_named_with_its_file(form: str, tmp_path: Path) -> None:
    path = tmp_path / "m.nemo"
    stored = make_nemo(path, small_config(num_layers=2), Variant(form, tp_size=2))
    assert export_folder(path, tmp_path / "whole", 2).is_dir()
    flip(path, stored["wte"][7])
    message = refused_export(path, tmp_path, "is damaged: the bytes of wte have another CRC-32")
    assert ("__0_0.distcp" if form == "torch_dist" else f"model_weights.ckpt of {path}") in message


def test_an_altered_torch_file_of_hugging_face(tmp_path: Path) -> None:
    model = DECODERS["gpt2"].make()
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    path = tmp_path / "hf" / "pytorch_model.bin"
    torch.save(model.transformer.state_dict(), path)
    flip(path, model.transformer.h[0].mlp.c_fc.bias.detach().numpy())
    refused_export(
        tmp_path / "hf",
        tmp_path,
        r"pytorch_model\.bin of .*hf is damaged: the bytes of layers\.0\.mlp\.dense_h_to_4h\.bias",
    )


def test_altered_adapters(tmp_path: Path) -> None:
    table = torch.randn(9, 16)
    state = {"prompt_table": {"prompt_table.t.prompt_embeddings.weight": table}}
    path = write_parts(tmp_path / "p.nemo", {"": state})
    read_parts(path)
    flip(path, table.numpy())
    with pytest.raises(CheckpointError, match=r"p\.nemo is damaged: the bytes of .*prompt_table"):
        read_parts(path)


def test_an_altered_description_of_the_tensors(tmp_path: Path) -> None:
    torch.save({"first": torch.ones(3), "second": torch.zeros(3)}, tmp_path / "file")
    content = (tmp_path / "file").read_bytes()
    (tmp_path / "file").write_bytes(content.replace(b"second", b"secone", 1))
    region = Archive(tmp_path).region("file")
    with pytest.raises(CheckpointError, match=r"data\.pkl have another CRC-32"):
        torch_file.load_torch_file(region, "file")


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    values = torch.randn(4, 5)
    wanted = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": values}, tmp_path / "file")
    finally:
        torch.serialization.set_crc32_options(wanted)
    archive = Archive(tmp_path)
    found = torch_file.load_torch_file(archive.region("file"), "file")["a"]
    archive.check(found, "a")
    assert np.array_equal(found, values.numpy())


def test_every_file_of_a_folder_has_its_own(tmp_path: Path) -> None:
    values = {name: torch.randn(300) for name in "abc"}
    for name, tensor in values.items():
        torch.save(tensor, tmp_path / name)
    flip(tmp_path / "b", values["b"].numpy())
    archive = Archive(tmp_path)
    found = {name: torch_file.load_torch_file(archive.region(name), name) for name in "cab"}
    for name in "ac":
        archive.check(found[name][7:9], name)
        archive.forget(found[name])
        assert np.array_equal(found[name], values[name].numpy())
    archive.check(found["b"].copy(), "a copy, which lies in no file")
    with pytest.raises(CheckpointError, match="b is damaged: the bytes of the second"):
        archive.check(found["b"][7:9], "the second")
