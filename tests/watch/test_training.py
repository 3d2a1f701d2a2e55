"""Which checkpoints of a training's folder are complete."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from launcher_scripts.common.errors import CheckpointError
from launcher_scripts.watch.training import saved_checkpoints


def write(*paths: Path, text: str = "x") -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def names(folder: Path) -> list[str]:
    return [checkpoint.name for checkpoint in saved_checkpoints(folder)]


def test_megatron_counts_up_to_its_tracker(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        write(tmp_path / f"iter_{step:07d}" / "mp_rank_00" / "model_optim_rng.pt")
    assert names(tmp_path) == []
    write(tmp_path / "latest_checkpointed_iteration.txt", text="20\n")
    found = saved_checkpoints(tmp_path)
    assert [(one.name, one.step) for one in found] == [("iter_0000010", 10), ("iter_0000020", 20)]
    assert found[0].path == tmp_path / "iter_0000010"


def test_a_tracker_that_says_release_names_no_iteration(tmp_path: Path) -> None:
    write(tmp_path / "iter_0000010" / "x", tmp_path / "latest_checkpointed_iteration.txt")
    assert names(tmp_path) == []


def test_trainer_needs_every_shard_and_its_state(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-500"
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    write(folder / "model.safetensors.index.json", text=json.dumps(index))
    write(folder / "config.json", folder / "model-1.safetensors", folder / "trainer_state.json")
    assert names(tmp_path) == []
    write(folder / "model-2.safetensors")
    assert names(tmp_path) == ["checkpoint-500"]
    (folder / "trainer_state.json").unlink()
    assert names(tmp_path) == []


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    for step in (1000, 500, 5000):
        folder = tmp_path / f"checkpoint-{step}"
        write(
            *(folder / name for name in ("config.json", "model.safetensors", "trainer_state.json"))
        )
    assert names(tmp_path) == ["checkpoint-500", "checkpoint-1000", "checkpoint-5000"]


@pytest.mark.parametrize("below", ["", "checkpoints"])
def test_nemo_files_of_top_k_and_last(tmp_path: Path, below: str) -> None:
    folder = tmp_path / below
    first, second = "gpt--val_loss=2.10-step=100", "gpt--val_loss=2.00-step=200"
    write(folder / f"{first}.ckpt", folder / f"{second}.ckpt", folder / f"{second}-last.ckpt")
    assert names(tmp_path) == [first, second]
    write(folder / f"{second}-unfinished")
    assert names(tmp_path) == [first, f"{second}-last"]


def test_a_last_one_counts_if_its_step_has_no_other_file(tmp_path: Path) -> None:
    write(tmp_path / "gpt--step=100.nemo", tmp_path / "gpt--step=200-last.nemo")
    assert names(tmp_path) == ["gpt--step=100", "gpt--step=200-last"]


def test_nemo_ranks_are_one_checkpoint(tmp_path: Path) -> None:
    file = "gpt--step=7.ckpt"
    write(tmp_path / "mp_rank_00" / file, tmp_path / "mp_rank_01" / "gpt--step=3.ckpt")
    assert names(tmp_path) == []
    write(tmp_path / "mp_rank_01" / file)
    (checkpoint,) = saved_checkpoints(tmp_path)
    assert checkpoint.path == tmp_path / "mp_rank_00" / file
    before = checkpoint.signature
    write(tmp_path / "mp_rank_01" / file, text="longer")
    assert saved_checkpoints(tmp_path)[0].signature != before


def test_nemo_2_folders(tmp_path: Path) -> None:
    write(
        tmp_path / "gpt--step=7" / "weights" / "metadata.json", tmp_path / "other" / "weights" / "x"
    )
    assert names(tmp_path) == ["gpt--step=7"]
    write(tmp_path / "gpt--step=7-unfinished")
    assert names(tmp_path) == []


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"watch\.training_dir"):
        saved_checkpoints(tmp_path / "missing")


def test_a_pipe_is_no_tracker(tmp_path: Path) -> None:
    write(tmp_path / "iter_0000010" / "x")
    os.mkfifo(tmp_path / "latest_checkpointed_iteration.txt")
    assert names(tmp_path) == []


def test_an_index_that_cannot_be_read_leaves_its_checkpoint_out(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-5"
    write(folder / "config.json", folder / "trainer_state.json")
    index = folder / "model.safetensors.index.json"
    for text in ("[" * 100_000, "[]", '{"weight_map": {"a": []}}', "\0", '{"weight_map": {}}'):
        index.write_text(text)
        assert names(tmp_path) == []


def test_a_folder_that_goes_while_it_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        write(tmp_path / f"iter_{step}" / "sub" / "x")
    write(tmp_path / "latest_checkpointed_iteration.txt", text="2")
    listed = Path.rglob

    def rglob(folder: Path, pattern: str) -> object:
        if folder.name == "iter_1":
            raise FileNotFoundError(folder)
        return listed(folder, pattern)

    monkeypatch.setattr(Path, "rglob", rglob)
    assert names(tmp_path) == ["iter_2"]
