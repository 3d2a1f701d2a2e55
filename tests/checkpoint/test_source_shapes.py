"""A source tensor of another shape is refused by its name, whichever axis differs: no value is
repeated, cut or folded to fill a row of the weight table."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from launcher_scripts.checkpoint.export import open_source
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.source_tensor import SourceTensor
from launcher_scripts.checkpoint.layout.source_checkpoint import SourceCheckpoint, TensorShards
from launcher_scripts.checkpoint.layout.tasks import plan_tasks
from launcher_scripts.common.errors import CheckpointError
from launcher_scripts.models import family_of
from tests.checkpoint.exporting import refused_export
from tests.checkpoint.test_gguf import WIDE, write
from tests.checkpoint.tiny_models import DECODERS, ENCODER_DECODERS, LATER_DECODERS, UNTIED_DECODERS
from tests.checkpoint_maker import Variant, make_nemo, small_config

FAST = {**DECODERS, **ENCODER_DECODERS}
ALL = {**LATER_DECODERS, **UNTIED_DECODERS, **FAST}


def plan(checkpoint: SourceCheckpoint) -> None:
    config = checkpoint.config
    plan_tasks(checkpoint, family_of(config).weights(config), "it")


def other_shapes(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """An axis of size 1, one that is larger, one less axis, and the axes in another order."""
    for axis, size in enumerate(shape):
        for other in {1, size + 1} - {size}:
            yield (*shape[:axis], other, *shape[axis + 1 :])
    if len(shape) > 1 and 1 not in shape:
        yield (math.prod(shape),)
    if len({*shape} - {1}) > 1:
        yield shape[::-1]


def zeros(shape: tuple[int, ...]) -> SourceTensor:
    return SourceTensor.full(np.broadcast_to(np.zeros((), np.float32), shape))


def check_shapes(checkpoint: Any) -> None:
    """Of every kind of tensor those of the last layer and expert."""
    plan(checkpoint)
    kinds = {re.sub(r"\.\d+\.", ".*.", name): name for name in checkpoint.names()}
    for name in kinds.values():
        sharded = isinstance(checkpoint, TensorShards)
        tensors = checkpoint.shards if sharded else checkpoint.tensors
        tensor = tensors[name][-1] if sharded else tensors[name]
        for shape in other_shapes(tensor.shape):
            changed = (*tensors[name][:-1], zeros(shape)) if sharded else zeros(shape)
            field = "shards" if sharded else "tensors"
            others = dataclasses.replace(checkpoint, **{field: {**tensors, name: changed}})
            with pytest.raises(CheckpointError) as caught:
                plan(others)
            assert checkpoint.stored_name(name) in str(caught.value), (name, shape)


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in ALL]
)
def test_huggingface(name: str, tmp_path: Path) -> None:
    ALL[name].make().save_pretrained(tmp_path)
    check_shapes(open_source(Archive(tmp_path), "huggingface"))


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("form", ["nemo", "mcore"])
def test_nemo(form: str, tp_size: int, tmp_path: Path) -> None:
    variant = Variant(form, tp_size=tp_size, container="folder")
    make_nemo(tmp_path / "a", small_config(), variant)
    check_shapes(open_source(Archive(tmp_path / "a"), "nemo"))


def test_gguf(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**WIDE))
    write(model, tmp_path / "a.gguf", gguf.GGMLQuantizationType.F32)
    check_shapes(open_source(Archive(tmp_path / "a.gguf"), "gguf"))


def test_all_tensors_that_do_not_fit_are_one_error(tmp_path: Path) -> None:
    DECODERS["llama"].make().save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    for name, columns in (("q_proj", 1), ("k_proj", 5), ("v_proj", 1)):
        key = f"model.layers.1.self_attn.{name}.weight"
        state[key] = state[key][:, :columns].clone()
    save_file(state, tmp_path / "model.safetensors")
    text = refused_export(tmp_path, tmp_path, "3 problems")
    assert "layers.1.self_attn.k_proj.weight has another shape" in text
    assert "got (8, 5); choices: (8, 16)" in text
