"""What LoRA adapters that stay beside the weights add to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from launcher_scripts.models.adapters import LORA_TARGETS
from tests.checkpoint.exporting import export_folder, open_weights


def with_adapter(weights: Any, config: Any, adapter: int, name: str, stem: str) -> torch.Tensor:
    """The weight called `name`, a projection's in LORA_TARGETS, with an adapter's update."""
    parts, weight = config.parts, weights[f"{name}.weight"]
    if stem not in parts.lora_targets:
        return weight
    down, up = (weights[f"{name}.lora_{side}.weight"] for side in ("in", "out"))
    sizes = [getattr(config, block) for block in LORA_TARGETS[stem].blocks] or [up.shape[1]]
    down = down.view(len(down), len(parts.lora_names), -1, parts.lora_rank)[:, adapter]
    ups = up.view(len(parts.lora_names), parts.lora_rank, -1)[adapter].split(sizes, dim=1)
    delta = [down[:, block] @ part for block, part in enumerate(ups)]
    return weight + torch.cat(delta, 1)


def check_kept(base: Path, target: Path, adapters: tuple[str, ...], merged: list[Any]) -> Any:
    """Export the adapters beside the base: each adds what is in its merged weights.

    Returns the exported config.
    """
    folder = export_folder(base, target, 2, lora_checkpoints=adapters)
    found, config = open_weights(folder)
    for number, expected in enumerate(merged):
        for stem in LORA_TARGETS:
            for name in (f"layers.{layer}.{stem}" for layer in range(config.num_layers)):
                if f"{name}.weight" in expected.rows:
                    got = with_adapter(found, config, number, name, stem)
                    torch.testing.assert_close(got, expected[f"{name}.weight"], rtol=0, atol=1e-5)
    return config
