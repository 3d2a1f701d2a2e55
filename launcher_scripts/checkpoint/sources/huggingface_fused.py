"""Experts that lie in one tensor a layer, as if each had tensors of its own.

IBM's Granite stores them so, and transformers 5 keeps the experts of all models so in memory, which
is what a state dict of such a model has.
"""

from __future__ import annotations

from collections.abc import Mapping

from launcher_scripts.checkpoint.formats.source_tensor import SourceTensor

# How a name ends -> what the rows [experts, rows, in] of an expert are, in parts of equal size.
_PARTS = {
    "block_sparse_moe.input_linear.weight": ("w1", "w3"),
    "block_sparse_moe.output_linear.weight": ("w2",),
    "mlp.experts.gate_up_proj": ("gate_proj", "up_proj"),
    "mlp.experts.down_proj": ("down_proj",),
}


def expert_tensors(tensors: Mapping[str, SourceTensor]) -> dict[str, SourceTensor]:
    """The tensors, those of all experts replaced by those of each."""
    found = {}
    for name, tensor in tensors.items():
        layer, dot, end = name.rpartition(".mlp." if ".mlp." in name else ".block_sparse_moe.")
        module = dot.strip(".")
        parts = _PARTS.get(f"{module}.{end}", ())
        if len(tensor.shape) != 3 or not parts:
            found[name] = tensor
            continue
        values, rows = tensor.read(), tensor.shape[1] // len(parts)
        for expert, own in enumerate(values):
            for number, part in enumerate(parts):
                key = f"{layer}.{module}.experts.{expert}.{part}.weight"
                found[key] = SourceTensor.whole(own[number * rows : (number + 1) * rows])
    return found
