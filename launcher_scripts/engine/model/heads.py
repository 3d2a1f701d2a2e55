"""The attention heads of one rank."""

from __future__ import annotations

from launcher_scripts.kernels.operands import Heads
from launcher_scripts.models.agm import AgmConfig
from launcher_scripts.models.bart import BartConfig
from launcher_scripts.models.gpt import GPTConfig
from launcher_scripts.models.t5 import T5Config


def local_heads(config: GPTConfig | AgmConfig, tp_size: int) -> Heads:
    """The heads of one rank; key/value heads are copied where the ranks outnumber them."""
    return Heads(
        num_heads=config.num_heads // tp_size,
        num_kv_heads=config.local_size("num_kv_heads", tp_size),
        head_size=config.head_size,
    )


def encoder_heads(config: T5Config | BartConfig, tp_size: int) -> Heads:
    """The encoder's heads of one rank."""
    return Heads(config.num_heads // tp_size, config.kv_heads // tp_size, config.head_size)


def decoder_heads(config: T5Config | BartConfig, tp_size: int) -> Heads:
    """The decoder's heads of one rank."""
    heads, kv_heads = config.num_decoder_heads, config.decoder_kv_heads
    return Heads(heads // tp_size, kv_heads // tp_size, config.decoder_head_size)
