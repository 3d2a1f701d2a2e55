"""Checkpoints: the formats that can be exported, by name."""

from launcher_scripts.checkpoint.huggingface import HuggingFaceCheckpoint
from launcher_scripts.checkpoint.nemo import NemoCheckpoint

SOURCES = {"nemo": NemoCheckpoint, "huggingface": HuggingFaceCheckpoint}
