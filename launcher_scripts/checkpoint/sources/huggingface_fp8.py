"""Weights that a Hugging Face checkpoint stores in FP8 (e4m3), widened as they are read; and which
scheme it says at all.

Three schemes of FP8 say so, in config.json's quantization_config or in ModelOpt's own file:
https://huggingface.co/docs/transformers/quantization/finegrained_fp8 (fp8, of DeepSeek and Qwen),
https://github.com/vllm-project/compressed-tensors (compressed-tensors), and
https://github.com/NVIDIA/Model-Optimizer (modelopt). In all of them a weight is its numbers times
a scale: of the tensor, of each output channel, or of each block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.formats.dtypes import FLOAT8, float32, widened
from launcher_scripts.checkpoint.formats.source_tensor import SourceTensor
from launcher_scripts.checkpoint.formats.workspace import Workspace
from launcher_scripts.checkpoint.sources.huggingface_raw import unknown_keys
from launcher_scripts.checkpoint.sources.huggingface_stacked_experts import Mxfp4Scheme
from launcher_scripts.common.errors import CheckpointError, Problems

KEY = "quantization_config"
MODELOPT_FILE = "hf_quant_config.json"
SCALES = ("weight_scale", "weight_scale_inv")  # beside a weight; both are multiplied
# Endings of scales that round inputs and keys and values, which the engine does in its own way.
OF_ACTIVATIONS = (
    *(".input_scale", ".output_scale", ".activation_scale"),
    *(".q_scale", ".k_scale", ".v_scale"),
)


@dataclass(frozen=True)
class Fp8Scheme:
    """How a checkpoint stores weights in FP8.  block: rows and columns that share a scale"""

    note = "weights stored in fp8 are widened; scales of activations are left out"

    block: tuple[int, int] | None = None

    def applied(self, tensors: dict[str, SourceTensor], problems: Problems) -> None:
        """Put weights as wide as they are in place of those in FP8, and take the scales away."""
        for name in [name for name in tensors if name.endswith(OF_ACTIVATIONS)]:
            del tensors[name]
        for name, base in list(tensors.items()):
            if base.dtype != FLOAT8:
                continue
            places = [name.removesuffix("weight") + scale for scale in SCALES]
            scales = [tensors.pop(place) for place in places if place in tensors]
            if len(scales) != 1:
                problems.add(f"{name} is in fp8 and has {len(scales)} scales", choices=places)
            elif (block := self._block(base.shape, scales[0].shape)) is None:
                problems.add(
                    f"the scales of {name} do not fit its shape {base.shape}", got=scales[0].shape
                )
            else:
                whole = np.dtype("<f4")
                tensors[name] = ScaledTensor(base.shape, whole, base.pieces, base, scales[0], block)

    def _block(self, shape: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int] | None:
        """The rows and columns that share one of the scales; None where they do not fit."""
        if len(shape) != 2:
            return None
        rows, columns = shape
        if scales in ((), (1,), (1, 1)):
            return rows, columns
        if scales in ((rows,), (rows, 1)):
            return 1, columns
        if self.block is None:
            return None
        blocks = tuple(-(-size // block) for size, block in zip(shape, self.block, strict=True))
        return self.block if scales == blocks else None


@dataclass(frozen=True)
class ScaledTensor(SourceTensor):
    """A weight times its scales, computed when it is read.  block: what shares one of them"""

    base: SourceTensor
    scales: SourceTensor
    block: tuple[int, int]

    def read(self, workspace: Workspace | None = None, name: str = "whole") -> NDArray[Any]:
        memory, (high, wide) = workspace or Workspace(), self.block
        found = memory.array(name, self.shape, self.dtype)
        values = self.base.read(memory, f"{name} fp8")
        scales = float32(self.scales.read(memory, f"{name} scales"))
        scales = scales.reshape(-(-self.shape[0] // high), -1)
        for number, row in enumerate(range(0, self.shape[0], high)):
            across = np.repeat(scales[number], wide)[: self.shape[1]]
            np.multiply(widened(values[row : row + high]), across, out=found[row : row + high])
        return found


def weight_scheme(
    config: Mapping[str, Any], modelopt: Mapping[str, Any] | None, problems: Problems
) -> Fp8Scheme | Mxfp4Scheme | None:
    """What the checkpoint says of quantized weights; problems note what is not such a scheme.

    config:   config.json
    modelopt: ModelOpt's file, if there is one
    """
    said = config.get(KEY)
    if said is None and modelopt is not None:
        part = modelopt.get("quantization")
        part = part if isinstance(part, Mapping) else {}
        # Without an algorithm only keys and values are quantized, or nothing is.
        said = {"quant_method": "modelopt", **part} if part.get("quant_algo") else None
    if said is None:
        return None
    method = said.get("quant_method") if isinstance(said, Mapping) else said
    if method not in _METHODS:
        problems.add(f"{KEY}: unknown quant_method", got=method, choices=_METHODS)
        return None
    return _METHODS[method](_Quantization(said, problems))


@dataclass(frozen=True)
class _Quantization:
    """What quantization_config says, or a section of it; problems note what is not supported."""

    said: Mapping[str, Any]
    problems: Problems

    def only(self, name: str, *choices: Any) -> None:
        """Refuse anything but these values, and null."""
        found = self.said.get(name)
        if found not in (None, *choices):
            self.problems.add(f"{KEY}.{name} is not supported", got=found, choices=choices)

    def nothing_else(self, *known: str) -> None:
        """Refuse keys that are none of these."""
        for name in unknown_keys(self.said, known):
            self.problems.add(f"{KEY}.{name} is not known here", got=self.said[name])

    def sizes(self, name: str) -> tuple[int, int] | None:
        found = self.said.get(name)
        if found is None:
            return None
        sizes = found if isinstance(found, list) else []
        if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
            self.problems.add(f"{KEY}.{name} must be two sizes", got=found)
            return None
        return sizes[0], sizes[1]


def _fine_grained(config: _Quantization) -> Fp8Scheme:
    config.only("fmt", "e4m3", "float8_e4m3fn")
    known = ("quant_method", "fmt", "weight_block_size", "activation_scheme", "scale_fmt")
    config.nothing_else(*known, "modules_to_not_convert", "ignored_layers")
    return Fp8Scheme(config.sizes("weight_block_size"))


def _compressed_tensors(config: _Quantization) -> Fp8Scheme:
    formats = ("float-quantized", "naive-quantized")
    config.only("format", *formats)
    config.only("quantization_status", "compressed")
    problems = config.problems
    _Quantization(config.said.get("sparsity_config") or {}, problems).only("format", "dense")
    of_activations = ("kv_cache_scheme", "global_compression_ratio", "version", "ignore")
    known = ("quant_method", "format", "quantization_status", "sparsity_config", "config_groups")
    config.nothing_else(*known, *of_activations)
    groups = config.said.get("config_groups")
    schemes = [
        _group(f"config_groups.{name}", group, problems, formats)
        for name, group in (groups if isinstance(groups, Mapping) else {}).items()
    ]
    if len(set(schemes)) != 1:
        problems.add(f"{KEY}.config_groups must say one scheme", got=groups)
        return Fp8Scheme()
    return schemes[0]


def _group(name: str, said: Any, problems: Problems, formats: tuple[str, ...]) -> Fp8Scheme:
    found = said.get("weights") if isinstance(said, Mapping) else None
    if not isinstance(found, Mapping):
        problems.add(f"{KEY}.{name} says nothing of weights", got=said)
        return Fp8Scheme()
    _Quantization(said, problems).only("format", *formats)
    for key, value in (("num_bits", 8), ("type", "float"), ("symmetric", True)):
        if found.get(key, value) != value:
            what = f"{KEY}.{name}.weights.{key} is not supported"
            problems.add(what, got=found[key], choices=[value])
    weights = _Quantization(found, problems)
    weights.only("strategy", "tensor", "channel", "block")
    return Fp8Scheme(weights.sizes("block_structure"))


def _modelopt(config: _Quantization) -> Fp8Scheme:
    method = config.said.get("quant_algo")
    if method != "FP8":
        config.problems.add(f"{KEY}.quant_algo", got=method, choices=["FP8"])
    return Fp8Scheme()


def _mxfp4(config: _Quantization) -> Mxfp4Scheme:
    config.nothing_else("quant_method", "modules_to_not_convert")
    return Mxfp4Scheme()


_METHODS: dict[Any, Callable[[_Quantization], Fp8Scheme | Mxfp4Scheme]] = {
    "fp8": _fine_grained,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
}


def check_no_weight_is_left(tensors: Mapping[str, SourceTensor]) -> None:
    """Raises CheckpointError for weights in FP8 of which nothing says how they are scaled."""
    left = [name for name, tensor in tensors.items() if tensor.dtype == FLOAT8]
    if left:
        raise CheckpointError(f"{len(left)} tensors are in fp8, and {KEY} is missing: {left[0]}")
