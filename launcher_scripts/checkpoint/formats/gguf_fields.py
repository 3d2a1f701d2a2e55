"""The metadata of a GGUF file's architecture, each value with the type it must have.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Which of them llama.cpp reads, and
what absent ones mean, is in `load_hparams` of its src/llama-model.cpp and in src/models/.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader

from launcher_scripts.common.errors import CheckpointError, Problems

_REQUIRED = object()
# Fields that say nothing about what a decoder computes, or nothing that tensors do not say.
IRRELEVANT = frozenset(
    {
        "tensor_data_layout",
        "rope.scaling.finetuned",
        "pooling_type",
    }
)
# Fields that may change the model, and the values with which they do not.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.sliding_window": (0,),
    "attention.temperature_scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_gating_func": (1,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_weights_scale": (0.0, 1.0),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "use_parallel_residual": (False,),
}


class Fields:
    """The fields `<architecture>.*` of an open file; wrong and missing ones are reported at once.

    problems: what is wrong with the file so far
    """

    def __init__(self, reader: GGUFReader, path: Path) -> None:
        self.reader = reader
        self.problems = Problems(f"the GGUF file {path}")
        self._read: set[str] = set()
        self.architecture = str(self.value("general.architecture", ""))

    def value(self, key: str, default: Any = _REQUIRED) -> Any:
        """The value of a whole key."""
        entry = self.reader.get_field(key)
        if entry is None:
            if default is _REQUIRED:
                self.problems.add(f"missing field {key}")
                return 1
            return default
        try:
            return entry.contents()
        except UnicodeDecodeError:
            self.problems.add(f"field {key} is not text")
            return 1

    def get(self, name: str, default: Any = _REQUIRED) -> Any:
        """The value of `<architecture>.<name>`."""
        self._read.add(name)
        return self.value(f"{self.architecture}.{name}", default)

    def size(self, name: str, default: Any = _REQUIRED) -> int:
        """A whole number from 1 on; of a list with one value per layer, the one that all share."""
        result = self.get(name, default)
        if isinstance(result, list) and len(result) > 0 and all(one == result[0] for one in result):
            result = result[0]
        if type(result) is int and result > 0:
            return result
        self.problems.add(f"{name} must be a whole number from 1 on", got=result)
        return 1

    def real(self, name: str, default: Any = _REQUIRED) -> float:
        """A number: the shortest decimal that gives the float32 that is stored."""
        found = self.get(name, default)
        if type(found) in (int, float):
            return float(str(np.float32(found)))
        self.problems.add(f"{name} must be a number", got=found)
        return 1.0

    def text(self, name: str, default: str) -> str:
        result = self.get(name, default)
        if isinstance(result, str):
            return result
        self.problems.add(f"{name} must be a text", got=result)
        return default

    def refuse_others(self) -> None:
        """Report every field of the architecture that was not read and may change the model."""
        prefix = f"{self.architecture}."
        for key in sorted(self.reader.fields):
            name = key.removeprefix(prefix)
            if not key.startswith(prefix) or name in self._read or name in IRRELEVANT:
                continue
            found = self.value(key)
            if found not in NEUTRAL.get(name, ()):
                self.problems.add(f"field {key} is not supported", got=found)

    def raise_problems(self) -> None:
        """Raise CheckpointError for all that was wrong."""
        self.problems.raise_if_any(CheckpointError)
