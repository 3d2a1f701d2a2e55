"""The look at a checkpoint's hyperparameters."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from launcher_scripts.checkpoint.formats import nemo_config
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.nemo_config import (
    NemoSizes,
    find_nemo_file,
    read_nemo_sizes,
)
from launcher_scripts.checkpoint.sources import nemo_files
from launcher_scripts.common.errors import CheckpointError
from tests.login.conftest import write_nemo


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_sizes_of_a_file_and_a_folder(tmp_path: Path, mode: str) -> None:
    sizes = {"num_layers": 3, "num_attention_heads": 12, "ffn_hidden_size": 64}
    path = write_nemo(tmp_path / "model.nemo", mode, **sizes)
    assert (
        read_nemo_sizes(path) == read_nemo_sizes(tmp_path / "model_content") == NemoSizes(3, 12, 64)
    )


@pytest.mark.parametrize("packed", [True, False])
def test_the_configuration_may_lie_deeper(tmp_path: Path, *, packed: bool) -> None:
    """Wherever the conversion finds it; the tokenizer lies beside it."""
    (tmp_path / "outer").mkdir()
    write_nemo(tmp_path / "outer" / "model.nemo", num_layers=3, num_attention_heads=12)
    (tmp_path / "outer" / "model.nemo").unlink()
    path = tmp_path / "outer"
    if packed:
        path = tmp_path / "deep.nemo"
        with tarfile.open(path, "w") as archive:
            archive.add(tmp_path / "outer", ".")
    assert read_nemo_sizes(path) == NemoSizes(3, 12, 64)
    nemo_config.check_source_tokenizer(path)
    root, config = nemo_files.read_nemo_config(Archive(path))
    assert (root, config["num_layers"]) == ("model_content/", 3)


def test_two_configurations_are_left_to_the_conversion(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_nemo(tmp_path / f"{name}.nemo", num_layers=3)
    assert read_nemo_sizes(tmp_path) is None


def test_tensor_parallel_sizes_divide_heads_and_mlp() -> None:
    assert NemoSizes(1, 12, 64).tp_sizes() == [1, 2, 4]
    assert NemoSizes(1, 6, None).tp_sizes() == [1, 2, 3, 6]
    assert NemoSizes(1, None, 64).tp_sizes() is None


def test_sizes_of_a_t5(tmp_path: Path) -> None:
    sizes = {"num_layers": 3, "num_attention_heads": 12, "ffn_hidden_size": 64}
    path = write_nemo(tmp_path / "t5.nemo", encoder=sizes, decoder=sizes)
    assert read_nemo_sizes(path) == NemoSizes(3, 12, 64)


def test_what_a_configuration_leaves_open_is_not_checked(tmp_path: Path) -> None:
    path = write_nemo(tmp_path / "m.nemo", num_layers="${x}", ffn_hidden_size=-1, encoder={"a": 1})
    assert read_nemo_sizes(path) == NemoSizes(None, None, None)


def test_what_is_no_nemo_checkpoint_is_left_to_the_converter(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / "model.gguf"):
        assert read_nemo_sizes(path) is None
        assert find_nemo_file(path) == path


@pytest.mark.parametrize("kind", ["link", "bomb", "list", "pickle"])
def test_a_configuration_that_is_none(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.nemo"
    member = tarfile.TarInfo("./model_config.yaml")
    content = {"list": b"- 1", "pickle": b"!!python/object/apply:os.system [true]"}.get(kind, b"")
    with tarfile.open(path, "w") as archive:
        if kind == "link":
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        elif kind == "bomb":
            content = bytes(17 * 2**20)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    with pytest.raises(CheckpointError, match=r"model_config\.yaml of"):
        read_nemo_sizes(path)


@pytest.mark.parametrize("keep", [0, 100, 3000])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    path = write_nemo(tmp_path / "model.nemo", "w:gz", num_layers=1, text="x" * 9)
    path.write_bytes(path.read_bytes()[: min(keep, path.stat().st_size // 2)])
    with pytest.raises(CheckpointError, match=r"model\.nemo"):
        read_nemo_sizes(path)


def test_checkpoints_of_nemo(shared_dir: Path) -> None:
    for folder in sorted((shared_dir / "fixtures" / "nemo").glob("*gpt_*")):
        for path in folder.glob("*.nemo"):
            if folder.name.startswith(("gpt_ptuning", "gpt_ia3", "gpt_adapter")):
                with pytest.raises(CheckpointError, match="a prompt or an adapter, not a model"):
                    read_nemo_sizes(path)
                continue
            sizes = read_nemo_sizes(path)
            assert sizes is not None and sizes.tp_sizes() is not None, folder.name
            assert sizes.num_layers in (2, 4, 8), folder.name


@pytest.mark.parametrize("part", [{"language_model_path": "/b"}, {"peft": {}, "encoder": {}}])
def test_a_part_of_a_model_is_named(tmp_path: Path, part: dict[str, object]) -> None:
    path = write_nemo(tmp_path / "part.nemo", **part)
    with pytest.raises(CheckpointError, match=r"part\.nemo is a prompt or an adapter.* its model"):
        read_nemo_sizes(path)


@pytest.mark.parametrize(("mode", "looks"), [("w", True), ("w:gz", False)])
def test_a_large_compressed_checkpoint_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, *, looks: bool
) -> None:
    """Its tokenizer, which may come last, is left to the conversion."""
    path = write_nemo(
        tmp_path / "m.nemo", mode, tokenizer={"model": "nemo:lost.model"}, num_layers=1
    )
    (tmp_path / "m_content" / "a1_spm.model").unlink()
    with tarfile.open(path, mode) as archive:
        archive.add(tmp_path / "m_content", ".")
    monkeypatch.setattr(nemo_config, "_MAX_DECOMPRESSED_BYTES", 512)
    if looks:
        with pytest.raises(CheckpointError, match=r"lost\.model"):
            nemo_config.check_source_tokenizer(path)
    else:
        nemo_config.check_source_tokenizer(path)
