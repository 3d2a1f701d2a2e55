"""The data types that `auto` stands for, and notes on data types that lose a model's range."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import numpy as np

from launcher_scripts.checkpoint.formats.dtypes import BFLOAT16
from launcher_scripts.checkpoint.layout.tasks import Task
from launcher_scripts.common.gpus import Gpu
from launcher_scripts.config.settings import AUTO, ExportSettings

_TYPES = {np.dtype("<f8"): "fp32", np.dtype("<f4"): "fp32", np.dtype("<f2"): "fp16"}
_TYPES[BFLOAT16] = "bf16"
T5_OVERFLOW = (
    "T5 is known to overflow in fp16: activations above 65,504 become infinite, and answers empty "
    "or wrong; {key}=bf16 (or fp32) has the range"
)


def checkpoint_type(tasks: Iterable[Task]) -> str:
    """Returns fp32, fp16 or bf16: the type of most stored values.

    Quantized values have no such type; the values beside them decide. Without any, it is fp32.
    """
    counts: Counter[str] = Counter()
    for task in tasks:
        for tensor in task.tensors:
            name = _TYPES.get(tensor.stored_dtype) if tensor.stored_dtype is not None else None
            if name is not None:
                counts[name] += math.prod(tensor.shape)
    return max(counts, key=counts.__getitem__, default="fp32")


def compute_type(settings: ExportSettings, weight_data_type: str, gpus: Iterable[Gpu]) -> str:
    """Returns the type that the engine computes in; `auto` is the type of the weights.

    float32 becomes bf16 where every GPU has it, which a printed note says.
    """
    if settings.data_type != AUTO:
        return settings.data_type
    gpus = tuple(gpus)
    on_gpu = bool(gpus) and settings.device != "cpu"
    if weight_data_type == "fp32" and on_gpu and all(gpu.has_bf16 for gpu in gpus):
        print(
            "note: the weights are float32, and the GPUs compute in bf16; "
            "export.triton_deployment.data_type=fp32 computes as the checkpoint is stored",
            flush=True,
        )
        return "bf16"
    return weight_data_type


def range_notes(settings: ExportSettings, stored: str, *, is_t5: bool) -> list[str]:
    """Returns notes on types that were set by hand, or that T5 overflows in.

    stored: the checkpoint's own type
    """
    notes = []
    for name in ("weight_data_type", "data_type"):
        value, key = getattr(settings, name), settings.key_of(name)
        if value == "fp16" and stored == "bf16":
            notes.append(
                f"{key} is fp16 and the checkpoint is bf16: values above 65,504 do not fit; "
                f"{key}=auto keeps bf16"
            )
        computed = stored if value == AUTO else value
        if name == "data_type" and computed == "fp16" and is_t5:
            notes.append(T5_OVERFLOW.format(key=key))
    return notes
