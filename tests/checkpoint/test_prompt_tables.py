"""Prompt tables of a small GPT: filled, computed from their encoder, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launcher_scripts.models.adapters import PromptTask
from tests.checkpoint.exporting import export_folder, open_weights
from tests.checkpoint.exporting import refused_export as refused
from tests.checkpoint.parts_maker import Random, prompt_config, prompt_state, write_parts
from tests.checkpoint_maker import small_config

CONFIG = small_config()


def test_prompt_tables_in_the_type_of_the_weights(base: Path, tmp_path: Path) -> None:
    random = Random(6)
    tables = {"squad": random(5, 32), "sentiment": random(3, 32), "boolq": random(2, 32)}
    one = write_parts(
        tmp_path / "1.nemo",
        {"": prompt_state({task: tables[task] for task in ("sentiment", "squad")})},
        prompt_config(squad=5, sentiment=3),
    )
    two = write_parts(
        tmp_path / "2.nemo", {"": prompt_state({"boolq": tables["boolq"]})}, prompt_config(boolq=2)
    )
    parts = (str(one), str(two))
    folder = export_folder(base, tmp_path / "a", 2, "fp16", prompt_checkpoints=parts)
    for task, table in tables.items():
        stored = np.fromfile(folder / f"model.prompt_table.{task}.weight.bin", np.float16)
        np.testing.assert_array_equal(stored, table.numpy().astype(np.float16).ravel())
    _, config = open_weights(folder)
    expected = (PromptTask("squad", 5), PromptTask("sentiment", 3), PromptTask("boolq", 2))
    assert config.parts.prompt_tasks == expected
    assert config.parts.prompt_start_id == CONFIG.vocab_size


def encoder_state(random: Random, kind: str, rows: int) -> dict[str, Any]:
    state: dict[str, Any] = {"prompt_table": {}, "embeddings": {"weight": random(rows, 32)}}
    names = ("0", "2") if kind == "mlp_head" else ("first", "second")
    state[kind] = {
        f"{names[0]}.weight": random(16, 32),
        f"{names[0]}.bias": random(16),
        f"{names[1]}.weight": random(32, 16),
        f"{names[1]}.bias": random(32),
    }
    return state


@pytest.mark.parametrize("kind", ["mlp_head", "tpmlp"])
def test_a_table_that_is_not_filled_is_computed(base: Path, tmp_path: Path, kind: str) -> None:
    state = encoder_state(Random(7), kind, 5)
    part = write_parts(tmp_path / "p.nemo", {"": state}, prompt_config(demo=5))
    folder = export_folder(base, tmp_path / "a", prompt_checkpoints=(str(part),))
    first, first_bias, second, second_bias = state[kind].values()
    inner = state["embeddings"]["weight"] @ first.T + first_bias
    if kind == "mlp_head":
        inner = inner.relu()
    else:
        inner = torch.nn.functional.gelu(inner, approximate="tanh")
    found = open_weights(folder)[0]["prompt_table.demo.weight"]
    torch.testing.assert_close(found, inner @ second.T + second_bias, rtol=1e-4, atol=1e-4)


def test_prompts_of_peft(base: Path, tmp_path: Path) -> None:
    random = Random(8)
    stem = "model.language_model.adapter_layer.ptuning_adapter."
    tensors = {
        "embedding.weight": random(5, 16),
        "first.weight": random(8, 16),
        "first.bias": random(8),
        "second.weight": random(32, 8),
        "second.bias": random(32),
        "inference_table": torch.full((5, 32), torch.nan),
    }
    axes = {"first.weight": 0, "first.bias": 0, "second.weight": 1}
    states = {
        f"mp_rank_{rank:02d}": {
            f"{stem}{name}": tensor.chunk(2, axes[name])[rank].clone() if name in axes else tensor
            for name, tensor in tensors.items()
        }
        for rank in range(2)
    }
    part = write_parts(tmp_path / "p.nemo", states)
    weights, config = open_weights(export_folder(base, tmp_path, prompt_checkpoints=(str(part),)))
    inner = tensors["embedding.weight"] @ tensors["first.weight"].T + tensors["first.bias"]
    inner = torch.nn.functional.gelu(inner, approximate="tanh")
    expected = inner @ tensors["second.weight"].T + tensors["second.bias"]
    assert config.parts.prompt_tasks == (PromptTask("task_0", 5),)
    torch.testing.assert_close(weights["prompt_table.task_0.weight"], expected)


def test_prompts_that_cannot_be_exported(base: Path, tmp_path: Path) -> None:
    random = Random(9)
    wide = write_parts(
        tmp_path / "wide.nemo", {"": prompt_state({"a": random(5, 64)})}, prompt_config(a=5)
    )
    refused(
        base, tmp_path, "prompt_table.a.weight has another shape", prompt_checkpoints=(str(wide),)
    )
    good = write_parts(
        tmp_path / "good.nemo", {"": prompt_state({"a": random(5, 32)})}, prompt_config(a=4)
    )
    refused(base, tmp_path, "another length", prompt_checkpoints=(str(good),))
    same = write_parts(tmp_path / "same.nemo", {"": prompt_state({"a": random(5, 32)})})
    refused(base, tmp_path, "task of this name", prompt_checkpoints=(str(same), str(same)))
    state = encoder_state(random, "mlp_head", 5) | {"lstm_head": {"weight_ih_l0": random(4, 4)}}
    lstm = write_parts(tmp_path / "lstm.nemo", {"": state}, prompt_config(demo=5))
    refused(base, tmp_path, "is not filled", prompt_checkpoints=(str(lstm),))
    empty = write_parts(tmp_path / "empty.nemo", {"": state}, prompt_config(demo=5, other=3))
    refused(base, tmp_path, "no prompt table is filled", prompt_checkpoints=(str(empty),))
    broken = encoder_state(random, "mlp_head", 5)
    del broken["mlp_head"]["2.bias"]
    damaged = write_parts(tmp_path / "d.nemo", {"": broken}, prompt_config(demo=5))
    refused(base, tmp_path, "encoder is damaged", prompt_checkpoints=(str(damaged),))
    outside = write_parts(tmp_path / "out.nemo", {"": prompt_state({"../a": random(5, 32)})})
    refused(base, tmp_path, "part of a file's name", prompt_checkpoints=(str(outside),))


@pytest.mark.parametrize("found", ["x", 3, ["x"], [{"taskname": "t", "total_virtual_tokens": "x"}]])
def test_damaged_task_templates(base: Path, tmp_path: Path, found: Any) -> None:
    state = prompt_state({"t": Random(1)(5, 32)})
    parts = write_parts(tmp_path / "p.nemo", {"": state}, {"task_templates": found})
    refused(
        base, tmp_path, "task_templates of the prompts are dam", prompt_checkpoints=(str(parts),)
    )
