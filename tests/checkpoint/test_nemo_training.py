"""Checkpoints in the folder of a training: which one is taken, and that it arrives whole."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.config.export import TokenizerSettings
from tests.checkpoint.exporting import export_folder, open_weights, refused_export
from tests.checkpoint.reference_forward_gpt import logits
from tests.checkpoint.test_torch_file import Evil
from tests.checkpoint.training_maker import add_checkpoint, checkpoint_name
from tests.checkpoint_maker import Variant, rebuilt, small_config

FORMS: dict[str, tuple[Variant, int]] = {
    "one rank": (Variant(), 1),
    "tp2": (Variant(tp_size=2), 1),
    "tp2 pp2": (Variant(tp_size=2, pp_size=2), 1),
    "pp2 vp2": (Variant(pp_size=4), 2),
    "tp2 pp4 vp2": (Variant(tp_size=2, pp_size=8), 2),
    "zarr": (Variant("zarr", tp_size=2), 1),
    "torch_dist": (Variant("torch_dist"), 1),
}


def check(folder: Path, stored: dict[str, np.ndarray]) -> None:
    found = rebuilt(FTCheckpoint.open(folder))
    assert found.keys() == stored.keys()
    for name, values in stored.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("below", ["", "checkpoints"])
def test_every_form(form: str, below: str, tmp_path: Path) -> None:
    variant, virtual = FORMS[form]
    config = small_config(num_layers=8)
    name = checkpoint_name(2.34, 7)
    stored = add_checkpoint(tmp_path / "t", config, variant, name, virtual=virtual)
    check(export_folder(tmp_path / "t" / below, tmp_path, 2), stored)


def test_a_checkpoint_without_its_settings(tmp_path: Path) -> None:
    """A Lightning file alone does not say the model's sizes."""
    add_checkpoint(tmp_path / "t", small_config(), Variant(), "one")
    (alone,) = (tmp_path / "t").rglob("one.ckpt")
    folder = tmp_path / "a" / "b" / "c"
    folder.mkdir(parents=True)
    shutil.copy(alone, folder)
    for path in (folder, folder / "one.ckpt"):
        refused_export(path, tmp_path, r"training \(one\) need its hparams\.yaml")


def test_a_checkpoint_by_its_path(tmp_path: Path) -> None:
    config = small_config()
    first, second = checkpoint_name(3.0, 5), checkpoint_name(2.0, 9)
    training = tmp_path / "t"
    stored = add_checkpoint(training, config, Variant(tp_size=2), first)
    add_checkpoint(training, config, Variant(tp_size=2), second, seed=1)
    file = training / "checkpoints" / "mp_rank_00" / f"{first}.ckpt"
    check(export_folder(file, tmp_path / "file"), stored)


def test_a_distributed_checkpoint_by_its_path(tmp_path: Path) -> None:
    name = checkpoint_name(3.0, 5)
    stored = add_checkpoint(tmp_path / "t", small_config(), Variant("zarr"), name)
    add_checkpoint(tmp_path / "t", small_config(), Variant("zarr"), f"{name}-last", seed=1)
    check(export_folder(tmp_path / "t" / "checkpoints" / name, tmp_path), stored)


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A training with four checkpoints; the stored values of each by its name."""
    folder = tmp_path_factory.mktemp("runs") / "t"
    names = [
        checkpoint_name(3.10, 5),
        checkpoint_name(1.90, 9),
        checkpoint_name(2.50, 12),
        checkpoint_name(2.60, 11, "-last"),
    ]
    return folder, {
        name: add_checkpoint(folder, small_config(), Variant(), name, seed=seed)
        for seed, name in enumerate(names)
    }


PICKED = {
    "last": checkpoint_name(2.60, 11, "-last"),
    "best": checkpoint_name(1.90, 9),
    checkpoint_name(3.10, 5): checkpoint_name(3.10, 5),
    checkpoint_name(2.50, 12) + ".ckpt": checkpoint_name(2.50, 12),
}


@pytest.mark.parametrize("wanted", PICKED)
def test_which_checkpoint(
    wanted: str, training: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, stored = training
    exported = export_folder(folder, tmp_path, training_checkpoint=wanted)
    check(exported, stored[PICKED[wanted]])
    manifest = FTCheckpoint.open(exported).manifest
    assert manifest is not None and manifest.source["checkpoint"] == PICKED[wanted]


def test_an_unfinished_checkpoint_does_not_count(
    training: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, stored = training
    shutil.copytree(folder, tmp_path / "t")
    (tmp_path / "t" / "checkpoints" / f"{PICKED['last']}-unfinished").touch()
    check(export_folder(tmp_path / "t", tmp_path), stored[checkpoint_name(2.50, 12)])


def test_a_checkpoint_that_is_not_there(
    training: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    message = r"no such checkpoint.*step=5.*export\.model\.training_checkpoint"
    refused_export(training[0], tmp_path, message, training_checkpoint="newest")


def test_no_loss_no_best(tmp_path: Path) -> None:
    add_checkpoint(tmp_path / "t", small_config(), Variant(), "megatron_gpt--val_acc=0.5-step=3")
    refused_export(tmp_path / "t", tmp_path, "cannot be told", training_checkpoint="best")


def test_a_lost_rank(tmp_path: Path) -> None:
    name = checkpoint_name(2.0, 3)
    add_checkpoint(tmp_path / "t", small_config(), Variant(tp_size=2, pp_size=2), name)
    (tmp_path / "t" / "checkpoints" / "tp_rank_01_pp_rank_001" / f"{name}.ckpt").unlink()
    refused_export(tmp_path / "t", tmp_path, "tensor-parallel rank 1, stage 1 is missing")


def test_damaged_hyperparameters(tmp_path: Path) -> None:
    add_checkpoint(tmp_path / "t", small_config(), Variant(), checkpoint_name(2.0, 3))
    (tmp_path / "t" / "hparams.yaml").write_text(yaml.safe_dump({"model": {}}))
    refused_export(tmp_path / "t", tmp_path, "damaged or holds no section cfg")


def test_nothing_in_a_training_is_run(tmp_path: Path) -> None:
    """Objects of any class are inert; a name that is an attack is refused."""
    name = checkpoint_name(2.0, 3)
    stored = add_checkpoint(tmp_path / "t", small_config(), Variant(), name)
    file = tmp_path / "t" / "checkpoints" / f"{name}.ckpt"
    state = torch.load(file, weights_only=False)
    torch.save({**state, "callbacks": signal.SIGTERM}, file)
    check(export_folder(tmp_path / "t", tmp_path), stored)
    torch.save({**state, "callbacks": Evil(tmp_path / "ran")}, file)
    refused_export(tmp_path / "t", tmp_path / "b", "which only an attack needs")
    assert not (tmp_path / "ran").exists()


FIXTURES = {
    "gpt_ptl_tp1_nemo1.23.0": (2e-4, 0),
    "mcore_gpt_ptl_distckpt_nemo1.23.0": (2e-4, 3),
    # Trained and run in bfloat16.
    "gpt_ptl_pp4_vp2_nemo1.23.0": (6e-2, 0),
}


@pytest.mark.parametrize("name", FIXTURES)
def test_nemos_own_trainings(name: str, shared_dir: Path, tmp_path: Path) -> None:
    """With the tokenizer that the hyperparameters name, found beside them."""
    tolerance, start_id = FIXTURES[name]
    source = shared_dir / "fixtures" / "nemo" / name
    folder = export_folder(
        source / "checkpoints", tmp_path, 2, tokenizer=TokenizerSettings("auto"), verify=True
    )
    weights, config = open_weights(folder)
    reference = np.load(source / "reference.npz")
    found = logits(weights, config, torch.from_numpy(reference["tokens"]).long()).numpy()
    np.testing.assert_allclose(found, reference["logits"], rtol=0, atol=tolerance)
    assert config.start_id == start_id
