"""The checkpoint folder: what the loader refuses, and the folders the original wrote."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from launcher_scripts.checkpoint.fastertransformer import folder as fastertransformer
from launcher_scripts.checkpoint.fastertransformer import manifest
from launcher_scripts.checkpoint.fastertransformer.config_ini import format_config, read_config
from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint, FTWriter, shard_files
from launcher_scripts.checkpoint.fastertransformer.manifest import read_manifest
from launcher_scripts.checkpoint.formats import source_tensor
from launcher_scripts.checkpoint.formats.archive import Crc32
from launcher_scripts.checkpoint.layout.layouts import full_blocks, rank_columns
from launcher_scripts.common.errors import CheckpointError
from launcher_scripts.models.gpt import GPTConfig
from launcher_scripts.models.gpt_weights import weights
from tests.checkpoint_maker import Variant, make_nemo, rebuilt, small_config


def write(folder: Path, config: GPTConfig, tp_size: int = 2, dtype: str = "fp32") -> Path:
    """A checkpoint of random weights, written as its parts."""
    random = np.random.default_rng(0)
    whole = {}
    with FTWriter(folder, config, tp_size, dtype, source={"format": "test"}) as writer:
        for file in shard_files(config, tp_size):
            name = file.spec.tensor_name(file.layer)
            if name not in whole:
                whole[name] = random.standard_normal(file.spec.shape_on(config, 1))
            blocks = full_blocks(file.spec, config, whole[name])
            columns = rank_columns(file.spec, config, tp_size, file.tp_rank, blocks)
            part = np.concatenate(columns, axis=-1).astype(writer.dtype)
            writer.write(file, [np.ascontiguousarray(part)])
        writer.copy(b"{}", "vocab.json")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "model" / "1" / "2-gpu", small_config())


def test_a_sound_folder(folder: Path) -> None:
    checkpoint = FTCheckpoint.open(folder)
    assert (checkpoint.tp_size, checkpoint.weight_data_type) == (2, "fp32")
    assert checkpoint.config == small_config()
    for spec in weights(checkpoint.config):
        for layer in spec.layer_numbers(checkpoint.config):
            values = checkpoint.read(spec, layer, 0)
            assert values.shape == spec.shape_on(checkpoint.config, 2)
            assert not values.flags.writeable
    assert checkpoint.manifest is not None
    names = {entry.name for entry in checkpoint.manifest.files}
    assert names == {path.name for path in folder.iterdir()} - {"manifest.json"}


def test_the_manifest_says_all(folder: Path) -> None:
    values = json.loads((folder / "manifest.json").read_text())
    assert values["tool"]["name"] == "nemo-deployment-launcher"
    assert values["source"] == {"format": "test"}
    entry = next(
        e for e in values["files"] if e["name"].endswith("0.mlp.dense_4h_to_h.weight.1.bin")
    )
    path = folder / entry["name"]
    assert entry == {
        "name": "model.layers.0.mlp.dense_4h_to_h.weight.1.bin",
        "bytes": path.stat().st_size,
        "blake3": manifest.hash_file(path),
        "shape": [20, 32],
        "dtype": "float32",
        "crc32": f"{zlib.crc32(path.read_bytes()):08x}",
    }


def test_several_threads_give_the_same_digests_and_copies(tmp_path: Path, monkeypatch) -> None:
    for module in (manifest, source_tensor):
        monkeypatch.setattr(module, "PARALLEL_BYTES", 1000)
        monkeypatch.setattr(module, "memory_threads", lambda: 4)
    values = np.arange(5003, dtype="<f4").reshape(-1, 1)[:5001]
    data, path = values.reshape(-1).view(np.uint8).data, tmp_path / "values"
    path.write_bytes(data)
    expected = [manifest.hash_file(path), f"{zlib.crc32(data):08x}"]
    digests = [manifest.new_digest(threads=4), Crc32()]
    manifest.add_bytes(digests, path, 0, 1234, 4)
    manifest.add_bytes(digests, path, 1234, 1 << 20, 4)
    assert [digest.hexdigest() for digest in digests] == expected
    assert [manifest.memory_digest(data, name) for name in ("blake3", "crc32")] == expected
    assert manifest.source_digest(path) == f"blake3:{file_lines(expected[0], path)}"
    copy = source_tensor.copied(values)
    assert np.array_equal(copy, values) and not np.shares_memory(copy, values)


def file_lines(digest: str, path: Path) -> str:
    """The digest of the line that b3sum prints of a file."""
    return manifest.content_digest(f"{digest}  {path.name}\n".encode(), "blake3")


def test_the_tools_version_is_the_projects(checkout: Path) -> None:
    lines = (checkout / "pyproject.toml").read_text().splitlines()
    assert f'version = "{manifest.TOOL_VERSION}"' in lines
    assert f'name = "{manifest.TOOL_NAME}"' in lines


def test_every_bad_file_is_named(folder: Path) -> None:
    weight = "model.layers.{}.attention.dense.weight.{}.bin"
    (folder / weight.format(0, 0)).unlink()
    short = folder / weight.format(1, 0)
    short.write_bytes(short.read_bytes()[:-1])
    long = folder / weight.format(2, 1)
    long.write_bytes(long.read_bytes() + b"0")
    altered = folder / weight.format(3, 1)
    content = bytearray(altered.read_bytes())
    content[7] ^= 1
    altered.write_bytes(content)
    (folder / "vocab.json").write_bytes(b"[]")
    with pytest.raises(CheckpointError, match="5 problems") as caught:
        FTCheckpoint.open(folder)
    for part in (
        f"{weight.format(0, 0)} is missing",
        f"{short.name} is too short",
        f"{long.name} is too long",
        f"{altered.name} is altered",
        "vocab.json is altered",
    ):
        assert part in str(caught.value)
    with pytest.raises(CheckpointError, match="3 problems"):
        FTCheckpoint.open(folder, verify=False)


def test_a_manifest_that_does_not_fit(folder: Path) -> None:
    path = folder / "manifest.json"
    values = json.loads(path.read_text())
    values["files"] = [e for e in values["files"] if e["name"] != "model.wte.bin"]
    path.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"model\.wte\.bin is not in the manifest"):
        FTCheckpoint.open(folder)
    path.write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot read .*manifest\.json"):
        FTCheckpoint.open(folder)
    path.write_text(json.dumps({**values, "version": 99}))
    with pytest.raises(CheckpointError, match="another format"):
        FTCheckpoint.open(folder)


def test_a_manifest_of_the_first_version(folder: Path) -> None:
    """It has sha256 alone, and finds an altered byte as well."""
    path = folder / "manifest.json"
    values = json.loads(path.read_text())
    for entry in values["files"]:
        entry.pop("blake3", None)
        entry.pop("crc32", None)
        entry["sha256"] = hashlib.sha256((folder / entry["name"]).read_bytes()).hexdigest()
    path.write_text(json.dumps({**values, "version": 1}))
    assert FTCheckpoint.open(folder).manifest is not None
    (folder / "vocab.json").write_bytes(b"[]")
    with pytest.raises(CheckpointError, match=r"vocab\.json is altered"):
        FTCheckpoint.open(folder)


def test_a_digest_of_no_known_kind(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"blake3"', '"md5"'))
    with pytest.raises(CheckpointError, match="has no digest of blake3, sha256"):
        FTCheckpoint.open(folder)


def test_config_and_files_must_agree(folder: Path) -> None:
    path = folder / "config.ini"
    path.write_text(path.read_text().replace("inter_size = 40", "inter_size = 48"))
    with pytest.raises(
        CheckpointError, match=r"config\.ini is altered, and not only its"
    ) as caught:
        FTCheckpoint.open(folder)
    assert "dense_h_to_4h.weight.0.bin does not fit config.ini" in str(caught.value)


def test_a_config_that_fits_all_files_and_was_altered(folder: Path) -> None:
    path = folder / "config.ini"
    text, changed = re.subn(r"(layernorm_eps\w*) = .*", r"\1 = 0.5", path.read_text())
    assert changed
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.ini is altered, and not only its start_id"):
        FTCheckpoint.open(folder)
    assert FTCheckpoint.open(folder, verify=False).config.norm_eps == 0.5


def test_start_and_end_may_be_edited(folder: Path) -> None:
    """The converter may not know them, so the original's guide has them set by hand."""
    path = folder / "config.ini"
    text, changed = re.subn(r"(start|end)_id = \d+", r"\1_id = 3", path.read_text())
    assert changed == 2
    path.write_text(text + "; set by hand\n")
    config = FTCheckpoint.open(folder).config
    assert (config.start_id, config.end_id) == (3, 3)


def original(folder: Path, **sections: str) -> Path:
    """The folder as the original leaves it: no manifest, no extension."""
    (folder / "manifest.json").unlink()
    (folder / "vocab.json").unlink()
    text = (folder / "config.ini").read_text().split("layernorm_eps")[0]
    lines = "".join(f"{key} = {value}\n" for key, value in sections.items())
    (folder / "config.ini").write_text(text + lines)
    return folder


def test_a_folder_of_the_original(folder: Path) -> None:
    expected = rebuilt(FTCheckpoint.open(folder))
    checkpoint = FTCheckpoint.open(original(folder))
    # The original's runtime knows no other eps when config.ini says none.
    assert checkpoint.config == dataclasses.replace(small_config(), norm_eps=1e-6)
    assert checkpoint.manifest is None
    for name, values in rebuilt(checkpoint).items():
        np.testing.assert_array_equal(values, expected[name])
    (folder / "model.wpe.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.wpe\.bin is too short"):
        FTCheckpoint.open(folder)


def test_keys_of_the_originals_other_converters(tmp_path: Path) -> None:
    config = small_config(
        position_embedding="alibi", embedding_norm=True, activation="relu", norm_placement="post"
    )
    folder = write(tmp_path / "2-gpu", config)
    original(
        folder,
        LayerNorm_eps="1e-5 ; as trained",
        layernorm_type="post_layernorm",
        activation_type="Relu",
        has_positional_encoding="False",
        has_pre_decoder_layernorm="1",
        use_attention_linear_bias="True",
    )
    text = (folder / "config.ini").read_text()
    (folder / "config.ini").write_text(text.replace("tensor_para_size = 2\n", ""))
    checkpoint = FTCheckpoint.open(folder)
    assert checkpoint.config == config
    assert checkpoint.tp_size == 2
    folder = folder.rename(tmp_path / "gpt3_345M")  # the files tell, where the name does not
    assert FTCheckpoint.open(folder).tp_size == 2


def test_an_output_layer_of_its_own_is_found_by_its_file(tmp_path: Path) -> None:
    folder = original(write(tmp_path / "2-gpu", small_config(tied_embeddings=False)))
    assert FTCheckpoint.open(folder).config.tied_embeddings is False


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model_variant", "bloom-post", "residuals taken after the norm"),
        ("has_adapters", "True", "adapter layers"),
        ("layernorm_eps", "small", "wrong value of layernorm_eps"),
        ("layernorm_type", "side_layernorm", "unknown layernorm_type"),
        ("activation_type", "Mish", "unknown activation"),
    ],
)
def test_what_the_original_could_not_serve_either(
    key: str, value: str, message: str, folder: Path
) -> None:
    original(folder, **{key: value})
    with pytest.raises(CheckpointError, match=message):
        FTCheckpoint.open(folder)


def test_missing_keys_are_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "config.ini").write_text("[gpt]\nhead_num = 4\nnum_layer = 2\n")
    with pytest.raises(CheckpointError, match="4 problems") as caught:
        FTCheckpoint.open(tmp_path)
    for key in ("size_per_head", "inter_size", "vocab_size", "tensor_para_size"):
        assert key in str(caught.value)


CONFIGS = {
    "plain": {},
    "llama": {
        "position_embedding": "rope",
        "rotary_percentage": 0.25,
        "rotary_base": 500000.0,
        "rotary_interpolation_factor": 2.0,
        "normalization": "rmsnorm",
        "activation": "silu",
        "gated": True,
        "num_kv_heads": 1,
        "attention_bias": False,
        "mlp_bias": False,
        "tied_embeddings": False,
        "pad_id": 0,
        "start_id": 1,
        "end_id": 2,
    },
    "alibi": {
        "position_embedding": "alibi",
        "alibi_layer_scaling": True,
        "activation": "squared_relu",
    },
    "post": {"norm_placement": "post", "final_norm": False, "activation": "gelu_erf"},
    "bloom": {"embedding_norm": True, "norm_eps": 1e-6, "head_size": 24},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config_ini_says_everything(name: str, tmp_path: Path) -> None:
    config = small_config(**CONFIGS[name])
    (tmp_path / "config.ini").write_text(format_config(config, 4, "fp16"))
    found = read_config(tmp_path)
    assert (found.config, found.tp_size, found.weight_data_type) == (config, 4, "fp16")


def test_the_writer_takes_nothing_incomplete(tmp_path: Path) -> None:
    config = small_config()
    writer = FTWriter(tmp_path / "m" / "2-gpu", config, 2, "fp32")
    with pytest.raises(CheckpointError, match="not every weight was written"), writer:
        pass
    assert list(tmp_path.iterdir()) == []
    file = next(iter(shard_files(config, 2)))
    with pytest.raises(CheckpointError, match="another size"), writer:
        writer.write(file, [np.zeros(3, "<f4")])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError, match="choices: 1, 2, 4"):
        FTWriter(tmp_path / "3-gpu", config, 3, "fp32")


# The same modules as a Python without the packages that only save time imports them.
WITHOUT_PACKAGES = """
import sys
from pathlib import Path

sys.modules["blake3"] = sys.modules["zlib_ng"] = None
from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.common.errors import CheckpointError
from launcher_scripts.steps.convert_checkpoint import main

folder, source, target = sys.argv[1:]
print(len(FTCheckpoint.open(Path(folder)).manifest.files))
altered = next(Path(folder).glob("*dense_4h_to_h.weight.1.bin"))
content = bytearray(altered.read_bytes())
content[3] ^= 4
altered.write_bytes(content)
try:
    FTCheckpoint.open(Path(folder))
except CheckpointError as error:
    print(error)
flags = ["--weight-data-type", "fp32", "--tokenizer", "none", "--overwrite"]
raise SystemExit(main(["--checkpoint-path", source, "--triton-model-dir", target, *flags]))
"""


def test_a_checkpoint_is_read_and_written_with_the_standard_library(
    folder: Path, tmp_path: Path, checkout: Path
) -> None:
    make_nemo(tmp_path / "m.nemo", small_config(num_layers=1), Variant())
    paths = [str(folder), str(tmp_path / "m.nemo"), str(tmp_path / "model")]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PACKAGES, *paths],
        env={**os.environ, "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"dense_4h_to_h\.weight\.1\.bin is altered; got '[0-9a-f]{8}'", done.stdout)
    made = read_manifest(tmp_path / "model" / "1" / "1-gpu")
    assert made is not None and {entry.algorithm for entry in made.files} == {"sha256"}
    assert FTCheckpoint.open(tmp_path / "model" / "1" / "1-gpu").manifest == made


def test_a_digest_whose_package_is_missing_is_no_damage(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "manifest.json"
    values = json.loads(path.read_text())
    for entry in values["files"]:
        entry.pop("crc32", None)
    path.write_text(json.dumps({**values, "version": 2}))
    assert FTCheckpoint.open(folder).manifest is not None
    monkeypatch.delitem(manifest.DIGESTS, "blake3")
    with pytest.raises(CheckpointError, match="needs the package blake3, which is missing"):
        FTCheckpoint.open(folder)


def test_a_file_is_written_by_small_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual machine may take ten times as long for 2 MiB in one call as in eight."""
    sizes: list[int] = []
    write = os.write

    def counting(descriptor: int, data: memoryview) -> int:
        sizes.append(len(data))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", counting)
    content = bytes(range(256)) * 4097
    with (tmp_path / "file").open("xb", buffering=0) as out:
        fastertransformer.write_fully(out.fileno(), memoryview(content))
    assert (tmp_path / "file").read_bytes() == content
    assert max(sizes) == 1 << 18
