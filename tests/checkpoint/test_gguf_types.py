"""Every type of GGUF tensors that gguf gives back is read; the others are refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from launcher_scripts.checkpoint.formats.gguf_file import open_gguf, read_tensor, readable_types
from launcher_scripts.checkpoint.sources.gguf_architectures import ARCHITECTURES
from launcher_scripts.checkpoint.sources.gguf_tokenizer import MODELS
from launcher_scripts.checkpoint.tokenizers.vocabularies import PRE_TOKENIZERS
from launcher_scripts.common.errors import CheckpointError
from tests.checkpoint.gguf_maker import finish

UNREADABLE = {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64", "Q1_0"}
ROWS, COLUMNS = 3, 512
# Where a block's float16 numbers lie: anything may stand there but NaN and infinity.
QUIET = 0x3F


def write(path: Path, kind: Kind, blocks: np.ndarray) -> Path:
    """A file of one tensor whose rows are `blocks`, bytes of whole blocks."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("a", blocks, raw_shape=blocks.shape, raw_dtype=kind)
    finish(writer)
    return path


def random_blocks(kind: Kind) -> np.ndarray:
    """[ROWS, bytes of a row]: every code a quantiser could have written, and many more."""
    size, width = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(3).integers(0, 256, (ROWS, COLUMNS // size * width), np.uint8)
    return blocks & QUIET if kind in (Kind.F32, Kind.F16, Kind.BF16) else blocks


def test_the_types_that_can_be_read_are_those_that_gguf_dequantises() -> None:
    known = {kind.name for kind in gguf.GGML_QUANT_SIZES}
    assert set(readable_types().values()) == known - UNREADABLE


@pytest.mark.parametrize("name", sorted(readable_types().values()))
def test_values(name: str, tmp_path: Path) -> None:
    kind = Kind[name]
    blocks = random_blocks(kind)
    (tensor,) = open_gguf(write(tmp_path / "a.gguf", kind, blocks)).tensors
    with np.errstate(all="ignore"):  # of NaN among the random scales
        expected = gguf.quants.dequantize(blocks, kind)
        found = read_tensor(tensor)
        second = read_tensor(tensor, 1)
    assert found.dtype == np.float32
    assert found.shape == (ROWS, COLUMNS)
    assert np.array_equal(found, expected, equal_nan=True)
    assert np.array_equal(second, expected[1], equal_nan=True)
    assert len(np.unique(found)) > 3


@pytest.mark.parametrize("name", sorted(UNREADABLE))
def test_another_type_is_refused_by_name(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", Kind[name], random_blocks(Kind[name]))
    with pytest.raises(CheckpointError, match=rf"got \['a: {name}'\]; choices: F32, .*IQ4_XS"):
        open_gguf(path)


def test_the_tables_of_the_documentation_are_those_of_the_code() -> None:
    text = (Path(__file__).parents[2] / "docs" / "checkpoint-families.md").read_text()
    section = text.split("## GGUF\n")[1].split("\n## ")[0]
    architectures, types, tokenizers = (
        [row.split("|")[1:3] for row in table.splitlines()[2:]]
        for table in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    )
    named = re.compile("`([^`]+)`").findall
    assert {name for row in architectures for name in named(row[0])} == set(ARCHITECTURES)
    read, refused = ({*named(row[1])} - {"gguf"} for row in types)
    assert (read, refused) == (set(readable_types().values()), UNREADABLE)
    assert [named(row[0])[0] for row in tokenizers] == sorted(MODELS)
    (pre,) = (named(row[1])[1:] for row in tokenizers if "tokenizer.ggml.pre" in row[1])
    assert pre == sorted(PRE_TOKENIZERS)
