"""Makes the folder of a NeMo training from a checkpoint of tests/checkpoint_maker.py."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from launcher_scripts.models.gpt import GPTConfig
from tests.checkpoint_maker import Variant, make_nemo

NAME = "megatron_gpt--val_loss={loss:.2f}-step={step}-consumed_samples={samples}.0{end}"


def checkpoint_name(loss: float, step: int, end: str = "") -> str:
    return NAME.format(loss=loss, step=step, samples=8 * step, end=end)


def add_checkpoint(
    folder: Path,
    config: GPTConfig,
    variant: Variant,
    name: str,
    *,
    virtual: int = 1,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Write `folder`/checkpoints/… and `folder`/hparams.yaml; returns the stored values.

    virtual: chunks of layers on each of variant.pp_size / virtual pipeline stages
    """
    made = folder / "made"
    folder.mkdir(exist_ok=True)
    variant = Variant(**{**vars(variant), "container": "folder"})
    stored = make_nemo(made, config, variant, seed)
    raw = yaml.safe_load((made / "model_config.yaml").read_text())
    raw["virtual_pipeline_model_parallel_size"] = virtual if virtual > 1 else None
    (folder / "hparams.yaml").write_text(yaml.safe_dump({"cfg": raw}))
    (made / "model_config.yaml").unlink()
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    if (made / "model_weights").is_dir():
        (made / "model_weights").rename(checkpoints / name)
        made.rmdir()
        return stored
    _lightning(made, checkpoints, name, virtual)
    return stored


def _lightning(made: Path, checkpoints: Path, name: str, virtual: int) -> None:
    """Rank files as PyTorch Lightning wraps them; later stages become chunks of the first ones."""
    ranks: dict[str, list[dict[str, Any]]] = {}
    files = sorted(made.rglob("model_weights.ckpt"))
    stages = len({file.parent.name[-3:] for file in files if "_pp_rank_" in file.parent.name}) or 1
    for file in files:
        rank = "" if file.parent == made else file.parent.name
        if "_pp_rank_" in rank:
            rank = f"{rank[:-3]}{int(rank[-3:]) % (stages // virtual):03d}"
        ranks.setdefault(rank, []).append(torch.load(file, weights_only=True))
        file.unlink()
        if file.parent != made:
            file.parent.rmdir()
    made.rmdir()
    for rank, chunks in ranks.items():
        (checkpoints / rank).mkdir(exist_ok=True)
        torch.save(_wrapped(chunks), checkpoints / rank / f"{name}.ckpt")


def _wrapped(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """What a training saves; objects of classes no reader of weights knows are part of it."""
    state = {
        "epoch": 0,
        "global_step": 7,
        "state_dict": chunks[0] if len(chunks) == 1 else {},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(3)}}}],
        "hyper_parameters": {"started": datetime.datetime(2024, 1, 1)},
    }
    if len(chunks) > 1:
        state |= {f"model{number}": _nested(chunk) for number, chunk in enumerate(chunks)}
    return state


def _nested(state: dict[str, Any]) -> dict[str, Any]:
    """The nested dicts of a virtual stage: modules by name, but the encoder's tensors flat."""
    nested: dict[str, Any] = {}
    for key, value in state.items():
        parts = key.removeprefix("model.").split(".")
        if "layers" in parts:
            at = parts.index("layers")
            parts = [*parts[:at], ".".join(parts[at:])]
        place = nested
        for part in parts[:-1]:
            place = place.setdefault(part, {})
        place[parts[-1]] = value
    return nested
