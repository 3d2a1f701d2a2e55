"""Experts that lie in one tensor a layer, as if each had tensors of its own.

IBM's Granite stores them so, and transformers 5 keeps the experts of all models so in memory, which
is what a state dict of such a model has.
"""

from __future__ import annotations

from collections.abc import Mapping

from launcher_scripts.checkpoint.formats.source_tensor import SourceTensor

# A module and how its tensor's name goes on -> what the rows [experts, rows, in] of an expert are,
# in parts of equal size.
_PARTS = {
    (".block_sparse_moe", ".input_linear.weight"): ("w1", "w3"),
    (".block_sparse_moe", ".output_linear.weight"): ("w2",),
    (".mlp", ".experts.gate_up_proj"): ("gate_proj", "up_proj"),
    (".mlp", ".experts.down_proj"): ("down_proj",),
}


def own_experts(tensors: Mapping[str, SourceTensor]) -> dict[str, SourceTensor]:
    """The tensors, those of all experts replaced by those of each."""
    found = dict(tensors)
    for (module, end), parts in _PARTS.items():
        for name, tensor in tensors.items():
            if len(tensor.shape) != 3 or not name.endswith(module + end):
                continue
            del found[name]
            stem, rows = name.removesuffix(end), tensor.shape[1] // len(parts)
            for expert, own in enumerate(tensor.read()):
                for number, part in enumerate(parts):
                    values = own[number * rows : (number + 1) * rows]
                    found[f"{stem}.experts.{expert}.{part}.weight"] = SourceTensor.whole(values)
    return found
