"""Checkpoints: the formats that can be exported, by name."""

from launcher_scripts.checkpoint.gguf_checkpoint import GGUFCheckpoint
from launcher_scripts.checkpoint.huggingface import HuggingFaceCheckpoint
from launcher_scripts.checkpoint.megatron import MegatronCheckpoint
from launcher_scripts.checkpoint.megatron_core import MegatronCoreCheckpoint
from launcher_scripts.checkpoint.nemo import NemoCheckpoint
from launcher_scripts.checkpoint.random_checkpoint import RandomCheckpoint

SOURCES = {
    "nemo": NemoCheckpoint,
    "megatron": MegatronCheckpoint,
    "megatron_core": MegatronCoreCheckpoint,
    "huggingface": HuggingFaceCheckpoint,
    "gguf": GGUFCheckpoint,
    "random": RandomCheckpoint,
}
