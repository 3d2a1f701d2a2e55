"""Archives, folders and configurations that were made to harm: each is one error of the project."""

from __future__ import annotations

import gzip
import io
import json
import os
import resource
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.nemo_config import find_nemo_file, read_nemo_sizes
from launcher_scripts.common import files
from launcher_scripts.common.errors import CheckpointError, LauncherError
from launcher_scripts.config.export import TokenizerSettings
from tests.checkpoint.exporting import refused_export
from tests.checkpoint.small_memory import small_memory
from tests.checkpoint.test_archive import write_tar
from tests.checkpoint.tiny_models import DECODERS
from tests.checkpoint_maker import Variant, make_nemo, raw_config, small_config

LONG = "x" * 5000
END = bytes(1024)


def header(kind: bytes, size: int, name: str = "a") -> bytes:
    """A tar header that says `size` bytes follow, in base 256 where octal digits do not reach."""
    info = tarfile.TarInfo(name)
    info.type = kind
    content = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    content[124:136] = tarfile.itn(size, 12, tarfile.GNU_FORMAT)
    content[148:156] = b" " * 8
    content[148:156] = b"%06o\0 " % sum(content)
    return bytes(content)


def block(content: bytes) -> bytes:
    return content + bytes(-len(content) % 512)


def pax(**values: str) -> bytes:
    """A pax header with the attributes of the member behind it."""
    lines = b""
    for key, value in values.items():
        rest = f" {key}={value}\n".encode()
        size = len(rest) + 1
        size += len(str(size + len(str(size)) - 1)) - 1
        lines += str(size).encode() + rest
    return header(tarfile.XHDTYPE, len(lines)) + block(lines)


ONE = header(tarfile.REGTYPE, 0)
NAME = header(tarfile.GNUTYPE_LONGNAME, 2) + block(b"b\0")
TARS = {
    "chained long names": NAME * 5000 + ONE + END,
    "chained pax headers": pax(path="b") * 5000 + ONE + END,
    "a name of 1 TB": header(tarfile.GNUTYPE_LONGNAME, 1 << 40) + ONE + END,
    "a link's name of 1 TB": header(tarfile.GNUTYPE_LONGLINK, 1 << 40) + ONE + END,
    "attributes of 1 TB": header(tarfile.XHDTYPE, 1 << 40) + ONE + END,
    "attributes of all, 1 TB": header(tarfile.XGLTYPE, 1 << 40) + ONE + END,
    "attributes of many digits": header(tarfile.XHDTYPE, 1 << 18) + b"1" * (1 << 18) + ONE + END,
    "a member of 1 TB": header(tarfile.REGTYPE, 1 << 40) + ONE + END,
    "a member of 2^70 bytes": header(tarfile.REGTYPE, 1 << 70) + ONE + END,
    "a negative size": header(tarfile.REGTYPE, -512) + ONE + END,
    "a name of a negative size": header(tarfile.GNUTYPE_LONGNAME, -512) + ONE + END,
    "a negative size in pax": pax(size="-1536") + ONE + END,
    "a sparse map of 1 TB": header(tarfile.GNUTYPE_SPARSE, 1 << 40) + END,
    "a pax map of many": pax(**{"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}) + ONE + END,
    "numbers that are none": pax(size="many", mtime="nan") + header(tarfile.REGTYPE, 3) + END,
    "no checksum": bytes(100) + b"a" * 412 + END,
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", ["tar", "gzip"])
@pytest.mark.parametrize("case", TARS)
def test_a_harmful_archive(case: str, mode: str, tmp_path: Path) -> None:
    """On the login side as in the job."""
    path = tmp_path / "a.nemo"
    path.write_bytes(gzip.compress(TARS[case]) if mode == "gzip" else TARS[case])
    with small_memory():
        text = refused_export(path, tmp_path, r"a\.nemo")
        with pytest.raises(CheckpointError, match=r"a\.nemo") as caught:
            read_nemo_sizes(path)
    for message in (text, str(caught.value)):
        assert "Error:" not in message and "MemoryError" not in message
        assert len(message) < 2000


def test_the_members_of_an_archive_are_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_MAX_MEMBERS", 3)
    path = tmp_path / "a.nemo"
    path.write_bytes(b"".join(header(tarfile.REGTYPE, 0, str(n)) for n in range(4)) + END)
    refused_export(path, tmp_path, "it has more than 3 members")


def test_a_long_name_is_a_name(tmp_path: Path) -> None:
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        with tarfile.open(tmp_path / "a", "w", format=form) as archive:
            archive.addfile(tarfile.TarInfo(LONG))
        assert Archive(tmp_path / "a").names() == [LONG]


def test_a_full_disk_while_unpacking(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.nemo", ("data", bytes(8 << 20)), mode="w:gz")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"cannot unpack .*a\.nemo in .*: File too large"):
            Archive(path, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(CheckpointError, match=r"cannot unpack .*No such file"):
        Archive(path, tmp_path / "nowhere")


def laughs(key: str) -> str:
    lines = [f"{key}0: &a0 [1, 2]"]
    lines += [f"{key}{n + 1}: &a{n + 1} [*a{n}, *a{n}]" for n in range(40)]
    return "\n".join(lines)


MERGED = "\n".join(
    ["a0: &a0 {k: 1}", *(f"a{n + 1}: &a{n + 1} {{<<: [*a{n}, *a{n}]}}" for n in range(40))]
)
YAMLS = {
    "aliases of aliases": laughs("k"),
    "merged aliases": MERGED,
    "an alias of itself": "a: &a [*a]",
    "nested lists": "a: " + "[" * 10_000,
    "nested mappings": "{a: " * 10_000,
    "nested by indentation": "\n".join(" " * n + "a:" for n in range(2000)),
    "a day that is none": "created: 2020-99-99",
    "a time that is none": "created: 2020-01-01 99:99:99",
    "a number of 5,000 digits": "hidden_size: " + "9" * 5000,
    "another Python's object": "a: !!python/object/apply:os.system [true]",
    "a list as key": "? [1, 2]\n: 3",
    "no text": "\0\1\2",
    "an unknown alias": "a: *b",
    "5 MB": "a: b\n" * (1 << 20),
    "a list": "[1, 2]",
    "nothing": "",
    "no end": '"',
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", YAMLS)
def test_a_harmful_configuration(case: str, tmp_path: Path) -> None:
    text = YAMLS[case].encode()
    file = write_tar(tmp_path / "a.nemo", ("model_config.yaml", text))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "model_config.yaml").write_bytes(text)
    for path in (file, folder):
        with small_memory():
            refused = refused_export(path, tmp_path, r"^model_config\.yaml of ")
            with pytest.raises(CheckpointError, match=r"model_config\.yaml of ") as caught:
                read_nemo_sizes(path)
        assert len(refused) < 1000 and len(str(caught.value)) < 1000


HUGE = 10**15
SIZES: dict[str, Any] = {
    "num_layers": HUGE,
    "num_attention_heads": HUGE,
    "ffn_hidden_size": 10**400,
    "hidden_size": HUGE,
    "max_position_embeddings": [HUGE],
    "kv_channels": {"a": 1},
    "position_embedding_type": ["rope"],
    "activation": {"a": [1]},
    "layernorm_epsilon": "1e-999999",
    "rotary_percentage": float("inf"),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("key", SIZES)
def test_impossible_hyperparameters(key: str, tmp_path: Path) -> None:
    make_nemo(tmp_path / "a.nemo", small_config(), Variant(raw={key: SIZES[key]}))
    if key in ("kv_channels", "rotary_percentage"):
        small = small_config(position_embedding="rope")
        make_nemo(tmp_path / "a.nemo", small, Variant("mcore", raw={key: SIZES[key]}))
    with small_memory():
        refused_export(tmp_path / "a.nemo", tmp_path, ".")
        sizes = read_nemo_sizes(tmp_path / "a.nemo")
        assert sizes is not None and len(sizes.tp_sizes() or []) <= 1 << 16


@pytest.fixture
def hugging_face(tmp_path: Path) -> Path:
    DECODERS["gpt2"].make().save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


DEEP = "[" * 100_000
JSONS: dict[str, Callable[[dict[str, Any]], str]] = {
    "nested": lambda _: DEEP,
    "nested in a value": lambda raw: json.dumps(raw)[:-1] + f', "a": {DEEP}',
    "5,000 digits": lambda raw: json.dumps(raw | {"n_head": 1}).replace("1", "9" * 5000),
    "no text": lambda _: "\0",
    "a list": lambda _: "[]",
    "an unknown type": lambda raw: json.dumps(raw | {"model_type": [1]}),
    "heads without end": lambda raw: json.dumps(raw | {"n_head": HUGE, "n_embd": HUGE}),
    "layers without end": lambda raw: json.dumps(raw | {"n_layer": HUGE}),
    "no heads": lambda raw: json.dumps(raw | {"n_head": 0}),
    "a text for a number": lambda raw: json.dumps(raw | {"n_embd": "many"}),
    "NaN": lambda raw: json.dumps(raw | {"layer_norm_epsilon": float("nan")}),
    "a token beyond the vocabulary": lambda raw: json.dumps(raw | {"bos_token_id": HUGE}),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", JSONS)
def test_a_harmful_config_json(case: str, hugging_face: Path, tmp_path: Path) -> None:
    path = hugging_face / "config.json"
    path.write_text(JSONS[case](json.loads(path.read_text())))
    with small_memory():
        text = refused_export(hugging_face, tmp_path, ".")
    assert "Error:" not in text


INDEXES = {
    "nested": DEEP,
    "a name of 5,000 characters": json.dumps({"weight_map": {"a": LONG}}),
    "a way out": json.dumps({"weight_map": {"a": "../../a.safetensors"}}),
    "no names": json.dumps({"weight_map": {"a": [1]}}),
    "numbers": json.dumps({"weight_map": {"a": 1}}),
    "a list": "[]",
}


@pytest.mark.parametrize("case", INDEXES)
def test_a_harmful_index(case: str, hugging_face: Path, tmp_path: Path) -> None:
    (hugging_face / "model.safetensors").unlink()
    (hugging_face / "model.safetensors.index.json").write_text(INDEXES[case])
    refused_export(hugging_face, tmp_path, r"model\.safetensors\.index\.json")


TOKENIZERS = {
    "a name of 5,000 characters": {"model": LONG},
    "a name with NUL": {"model": "a\0b"},
    "a list": [1, 2],
    "a number": {"model": 5},
    "special tokens that are none": {"model": "a.json", "special_tokens": [1]},
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_harmful_tokenizer_section(case: str, tmp_path: Path) -> None:
    variant = Variant(raw={"tokenizer": TOKENIZERS[case]})
    make_nemo(tmp_path / "a.nemo", small_config(), variant)
    auto = TokenizerSettings("auto")
    refused_export(tmp_path / "a.nemo", tmp_path, "does not hold its tokenizer", tokenizer=auto)
    training = tmp_path / "training"
    make_nemo(tmp_path / "folder", small_config(), Variant(container="folder"))
    (training / "checkpoints").mkdir(parents=True)
    weights = tmp_path / "folder" / "model_weights.ckpt"
    weights.rename(training / "checkpoints" / "m--step=1.ckpt")
    raw = {"cfg": raw_config(small_config(), variant)}
    (training / "hparams.yaml").write_text(yaml.safe_dump(raw))
    refused_export(training, tmp_path, "training", tokenizer=auto)


@pytest.mark.timeout(60)
def test_a_pipe_is_no_checkpoint(tmp_path: Path) -> None:
    """Nobody writes to it: opening it would wait without end."""
    for name in ("a.nemo", "a.gguf", "a"):
        os.mkfifo(tmp_path / name)
        refused_export(tmp_path / name, tmp_path, "cannot read the checkpoint .* not a plain file")
    for name in ("a.nemo", "a"):
        with pytest.raises(CheckpointError, match="not a plain file"):
            read_nemo_sizes(tmp_path / name)
    folder = tmp_path / "folder"
    make_nemo(folder, small_config(), Variant(container="folder"))
    (folder / "model_config.yaml").unlink()
    os.mkfifo(folder / "model_config.yaml")
    refused_export(folder, tmp_path, "in no known format")
    with pytest.raises(CheckpointError, match="not a plain file"):
        read_nemo_sizes(folder)


@pytest.mark.timeout(60)
def test_a_pipe_is_no_tokenizer(tmp_path: Path) -> None:
    make_nemo(tmp_path / "a.nemo", small_config())
    os.mkfifo(tmp_path / "tokenizer.json")
    settings = TokenizerSettings("files", model=str(tmp_path / "tokenizer.json"))
    refused_export(tmp_path / "a.nemo", tmp_path, "not a plain file", tokenizer=settings)


def test_a_path_of_5000_characters(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match="File name too long"):
        find_nemo_file(tmp_path / LONG)
    refused_export(tmp_path / LONG, tmp_path, "File name too long")


def zip_of(*entries: tuple[str, int, int]) -> bytes:
    """The directory of a zip archive alone: (name, declared size, place) of its entries."""
    directory = io.BytesIO()
    for name, size, place in entries:
        sizes = struct.pack("<HHQQQ", 1, 24, size, size, place)
        fixed = (b"PK\x01\x02", 45, 45, 0, 0, 0, 0, 0, 2**32 - 1, 2**32 - 1, len(name))
        rest = (len(sizes), 0, 0, 0, 0, 2**32 - 1)
        directory.write(struct.pack("<4s6H3L3H2HLL", *fixed, *rest) + name.encode() + sizes)
    content = directory.getvalue()
    count = len(entries) & 0xFFFF
    return content + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, len(content), 0, 0)


# Their entries, as of zip_of: the archives are made where they are read.
ZIPS = {
    "1 TB of description": [("a/data.pkl", 1 << 40, 0)],
    "2^63 bytes": [("a/data.pkl", 1 << 63, 0)],
    "a place beyond the file": [("a/data.pkl", 10, 1 << 40)],
    "two in one place": [("a/data.pkl", 10, 0), ("a/data/0", 10, 0)],
    "200,000 entries": [(f"a/data/{key}", 0, 0) for key in range(200_000)],
    "a name of 5,000 characters": [(LONG, 10, 0)],
}


@pytest.mark.parametrize("case", ZIPS)
def test_a_harmful_file_of_torch(case: str, tmp_path: Path) -> None:
    raw = yaml.safe_dump(raw_config(small_config(), Variant())).encode()
    members = (("model_config.yaml", raw), ("model_weights.ckpt", zip_of(*ZIPS[case])))
    path = write_tar(tmp_path / "a.nemo", *members)
    with small_memory():
        text = refused_export(path, tmp_path, r"outside of its file|model_weights\.ckpt of ")
    assert "MemoryError" not in text
