"""Checkpoints: the formats that can be exported, by name."""

from launcher_scripts.checkpoint.sources.gguf_checkpoint import GGUFCheckpoint
from launcher_scripts.checkpoint.sources.huggingface import HuggingFaceCheckpoint
from launcher_scripts.checkpoint.sources.megatron import MegatronCheckpoint
from launcher_scripts.checkpoint.sources.megatron_core import MegatronCoreCheckpoint
from launcher_scripts.checkpoint.sources.nemo import NemoCheckpoint
from launcher_scripts.checkpoint.sources.random_checkpoint import RandomCheckpoint

SOURCES = {
    "nemo": NemoCheckpoint,
    "megatron": MegatronCheckpoint,
    "megatron_core": MegatronCoreCheckpoint,
    "huggingface": HuggingFaceCheckpoint,
    "gguf": GGUFCheckpoint,
    "random": RandomCheckpoint,
}
