"""What a user tells about a checkpoint that does not say it itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hints:
    """Answers to what a source may ask.

    num_heads:    attention heads, for a checkpoint without hyperparameters
    encoder_only: of an encoder-decoder, export the encoder
    training_checkpoint: of a training's checkpoints, the `last`, the `best`, or one by its name
    """

    num_heads: int | None = None
    encoder_only: bool = False
    training_checkpoint: str = "last"
