"""Weights of two to eight bits, dequantized as they are read: one row per way to store them.

A row names the tensors that take the place of a module's `weight`, checks how they fit together
and computes some rows of the weight at a time, so that memory holds one weight in float32 and
little more. The formulas are those of the libraries that write the formats:

- GPTQ:               https://github.com/ModelCloud/GPTQModel
- AWQ:                https://github.com/casper-hansen/AutoAWQ
- compressed-tensors: https://github.com/vllm-project/compressed-tensors
- ModelOpt:           https://github.com/NVIDIA/Model-Optimizer
- bitsandbytes:       https://github.com/bitsandbytes-foundation/bitsandbytes
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.formats.source_tensor import (
    E8M0,
    FLOAT8,
    FLOATS,
    SourceTensor,
    Workspace,
    dtype_name,
    float32,
)
from launcher_scripts.checkpoint.sources.huggingface_stacked_experts import fp4_pairs
from launcher_scripts.common.errors import Problems

Arrays = Mapping[str, NDArray[Any]]
Parts = Mapping[str, SourceTensor]
# (arrays of the parts, first row, last row) -> float32 [rows, width]
Rows = Callable[[Arrays, int, int], NDArray[Any]]

_WORD = 32  # bits
_I4, _I1, _U1 = np.dtype("<i4"), np.dtype("i1"), np.dtype("u1")
_CHUNK_VALUES = 1 << 18  # computed at a time: their steps fit a processor's cache
_EXPONENT_BIAS = 127
# The nibble of a word in which AutoAWQ keeps each of eight neighbours.
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
_INT8_SCALE = 127.0  # of bitsandbytes: the largest number stands for the row's largest value
_QUANT_STATES = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")
_NUM_CODES = 16
_MAX_STATE_BYTES = 1 << 16


@dataclass(frozen=True)
class PackedTensor(SourceTensor):
    """A weight [out, in] in float32, computed when it is read.

    parts:      the stored tensors
    rows:       computes rows of the weight, or of its transpose
    transposed: the stored tensors have the inputs as rows
    """

    parts: Parts
    rows: Rows
    transposed: bool = False

    @classmethod
    def of(cls, shape: tuple[int, int], parts: Parts, rows: Rows, **more: Any) -> PackedTensor:
        pieces = tuple(piece for part in parts.values() for piece in part.pieces)
        return cls(shape, np.dtype("<f4"), pieces, parts, rows, **more)

    def read(self, workspace: Workspace | None = None, name: str = "whole") -> NDArray[Any]:
        memory = workspace or Workspace()
        arrays = {key: part.read(memory, f"{name} {key}") for key, part in self.parts.items()}
        height, width = self.shape[::-1] if self.transposed else self.shape
        values = memory.array(name, (height, width), self.dtype)
        step = max(_CHUNK_VALUES // max(width, 1), 1)
        for first in range(0, height, step):
            last = min(first + step, height)
            values[first:last] = self.rows(arrays, first, last)
        return values.T if self.transposed else values


@dataclass(frozen=True)
class WeightFormat:
    """One way to store a module's weight.

    main:     the tensor that has most of its bytes, and by which a module of this kind is known
    dtype:    the type of this tensor, for formats that call it `weight`
    required: further tensors
    optional: tensors that may be missing
    build:    makes the weight; raises ValueError for tensors that do not fit together
    """

    name: str
    main: str
    dtype: np.dtype[Any]
    required: tuple[str, ...]
    optional: tuple[str, ...]
    build: Callable[[Parts], PackedTensor]

    @property
    def note(self) -> str:
        return f"weights stored in {self.name} are dequantized"

    def applied(self, tensors: dict[str, SourceTensor], problems: Problems) -> None:
        """Replace the stored tensors of each module by its weight."""
        for name, tensor in list(tensors.items()):
            stem = name.removesuffix(f".{self.main}")
            if stem == name or tensor.dtype != self.dtype:
                continue
            names = (self.main, *self.required, *self.optional)
            parts = {key: tensors[f"{stem}.{key}"] for key in names if f"{stem}.{key}" in tensors}
            missing = [f"{stem}.{key}" for key in self.required if key not in parts]
            if missing:
                problems.add(f"{name} is in {self.name} and lacks {', '.join(missing)}")
                continue
            try:
                weight = self.build(parts)
            except ValueError as error:
                shapes = {key: (part.shape, dtype_name(part.dtype)) for key, part in parts.items()}
                problems.add(f"{stem} in {self.name}: {error}", got=shapes)
                continue
            for key in parts:
                del tensors[f"{stem}.{key}"]
            tensors[f"{stem}.weight"] = weight


def _check(fits: bool, message: str) -> None:
    if not fits:
        raise ValueError(message)


def _check_float(part: SourceTensor, message: str) -> None:
    _check(part.dtype in FLOATS, f"{message} are not floats")


def _unpacked(words: NDArray[Any], bits: int, first: int, last: int, axis: int) -> NDArray[Any]:
    """Numbers `first` to `last` of words that hold them one after another, the lowest bits first.

    words: int32 [rows, columns]; `axis` is the one along which they lie
    """
    start = np.arange(first, last) * bits
    index, shift = start // _WORD, (start % _WORD).astype(np.uint32)
    shift = shift[:, None] if axis == 0 else shift
    unsigned = words.view("<u4")
    numbers = np.take(unsigned, index, axis) >> shift
    if _WORD % bits:  # some begin in one word and end in the next
        following = np.take(unsigned, np.minimum(index + 1, words.shape[axis] - 1), axis)
        left = (_WORD - shift).astype(np.uint32)
        numbers |= np.where(left < bits, following << (left & (_WORD - 1)), 0).astype(np.uint32)
    result: NDArray[Any] = (numbers & ((1 << bits) - 1)).astype(np.int32)
    return result


def _num_words(count: int, bits: int) -> int:
    return -(-count * bits // _WORD)


def gptq(bits: int, group_size: int, zero_offset: int, ones: tuple[int, ...]) -> WeightFormat:
    """GPTQ, also with act-order (g_idx).

    group_size:  inputs that share a scale, unless g_idx lists the group of each; -1: all
    zero_offset: what each zero point is stored less by
    ones:        what the words of zero points are stored less by, in turn
    """

    def build(parts: Parts) -> PackedTensor:
        words, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
        _check(all(len(part.shape) == 2 for part in (words, zeros, scales)), "expected matrices")
        _check(zeros.dtype == _I4, "qzeros are not int32")
        _check_float(scales, "scales")
        groups, outputs = scales.shape
        order = parts.get("g_idx")
        inputs = words.shape[0] * _WORD // bits if order is None else order.shape[0]
        size = inputs if group_size == -1 else group_size
        _check(words.shape == (_num_words(inputs, bits), outputs), "qweight has another shape")
        _check(zeros.shape == (groups, _num_words(outputs, bits)), "qzeros have another shape")
        if order is None:
            _check(groups == -(-inputs // size), f"expected {-(-inputs // size)} groups")
        else:
            _check(order.dtype == _I4 and len(order.shape) == 1, "g_idx is not a list of int32")
            indices = order.read()
            in_range = bool(((indices >= 0) & (indices < groups)).all())
            _check(in_range, f"g_idx names groups beyond {groups}")
        more: dict[str, Any] = {"zero_offset": zero_offset, "ones": ones}
        rows = partial(_gptq_rows, bits=bits, group_size=size, **more)
        return PackedTensor.of((outputs, inputs), parts, rows, transposed=True)

    required = ("qzeros", "scales")
    return WeightFormat(f"GPTQ of {bits} bits", "qweight", _I4, required, ("g_idx",), build)


@dataclass(frozen=True)
class ZeroBiases:
    """AutoGPTQ stores a bias of zeros for modules that have none."""

    note = ""

    def applied(self, tensors: dict[str, SourceTensor], _problems: Problems) -> None:
        """Remove the biases of packed modules of one name if all of them are zeros."""
        biases: dict[str, list[str]] = {}
        for name, tensor in tensors.items():
            bias = f"{name.removesuffix('.weight')}.bias"
            if isinstance(tensor, PackedTensor) and bias in tensors:
                biases.setdefault(name.split(".")[-2], []).append(bias)
        for names in biases.values():
            if not any(float32(tensors[name].read()).any() for name in names):
                for name in names:
                    del tensors[name]


def _gptq_rows(
    arrays: Arrays,
    first: int,
    last: int,
    *,
    bits: int,
    group_size: int,
    zero_offset: int,
    ones: tuple[int, ...],
) -> NDArray[Any]:
    scales, words = arrays["scales"], arrays["qzeros"]
    order = arrays.get("g_idx")
    group = np.arange(first, last) // group_size if order is None else order[first:last]
    numbers = _unpacked(arrays["qweight"], bits, first, last, 0)
    if ones:
        words = (words.view("<u4") + np.resize(np.array(ones, "<u4"), words.shape[1])).view(_I4)
    zeros = _unpacked(words[group], bits, 0, scales.shape[1], 1)
    zeros = (zeros + zero_offset) & ((1 << bits) - 1)
    result: NDArray[Any] = (numbers - zeros).astype(np.float32) * float32(scales[group])
    return result


def awq(group_size: int) -> WeightFormat:
    """AutoAWQ's `gemm` of four bits.  group_size: inputs that share a scale; -1: all"""

    def build(parts: Parts) -> PackedTensor:
        words, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
        _check(all(len(part.shape) == 2 for part in (words, zeros, scales)), "expected matrices")
        _check(zeros.dtype == _I4, "qzeros are not int32")
        _check_float(scales, "scales")
        inputs, outputs = words.shape[0], words.shape[1] * 8
        size = inputs if group_size == -1 else group_size
        groups = -(-inputs // size)
        _check(zeros.shape == (groups, words.shape[1]), "qzeros have another shape")
        _check(scales.shape == (groups, outputs), "scales have another shape")
        rows = partial(_awq_rows, group_size=size)
        return PackedTensor.of((outputs, inputs), parts, rows, transposed=True)

    return WeightFormat("AWQ", "qweight", _I4, ("qzeros", "scales"), (), build)


def _awq_rows(arrays: Arrays, first: int, last: int, *, group_size: int) -> NDArray[Any]:
    group = np.arange(first, last) // group_size
    numbers = _awq_numbers(arrays["qweight"][first:last]) - _awq_numbers(arrays["qzeros"][group])
    result: NDArray[Any] = numbers.astype(np.float32) * float32(arrays["scales"][group])
    return result


def _awq_numbers(words: NDArray[Any]) -> NDArray[Any]:
    shifts = np.array(_AWQ_NIBBLES, np.uint32) * np.uint32(4)
    numbers = words.view("<u4")[:, :, None] >> shifts & np.uint32(15)
    result: NDArray[Any] = numbers.reshape(len(words), -1).astype(np.int32)
    return result


def pack_quantized(choices: Mapping[int, bool]) -> WeightFormat:
    """compressed-tensors' `pack-quantized`: integers around 0, stored with an offset.

    choices: bits of a module's numbers -> they are symmetric, without zero points
    """

    def build(parts: Parts) -> PackedTensor:
        words, stored = parts["weight_packed"], parts["weight_shape"]
        _check(len(words.shape) == 2 and stored.shape == (2,), "expected a matrix and its shape")
        outputs, inputs = (int(size) for size in stored.read())
        fits = [b for b in choices if words.shape == (outputs, _num_words(inputs, b))]
        _check(len(fits) == 1, f"the shape {outputs, inputs} does not fit {[*choices]} bits")
        bits = fits[0]
        _check_scales(parts, outputs, inputs)
        zeros = parts.get("weight_zero_point")
        _check(choices[bits] or zeros is not None, "weight_zero_point is missing")
        if zeros is not None:
            groups = parts["weight_scale"].shape[-1]
            shape = {_I4: (_num_words(outputs, bits), groups), _I1: (outputs, groups)}
            _check(zeros.shape == shape.get(zeros.dtype), "weight_zero_point has another shape")
        rows = partial(_packed_rows, bits=bits, inputs=inputs)
        return PackedTensor.of((outputs, inputs), parts, rows)

    name = f"pack-quantized of {' and '.join(map(str, choices))} bits"
    required, optional = ("weight_scale", "weight_shape"), ("weight_zero_point", "weight_g_idx")
    return WeightFormat(name, "weight_packed", _I4, required, optional, build)


def _check_scales(parts: Parts, outputs: int, inputs: int) -> None:
    """Scales of the tensor, of each output, or of groups of each output's inputs."""
    scales, order = parts["weight_scale"], parts.get("weight_g_idx")
    _check_float(scales, "weight_scale")
    single = scales.shape in ((), (1,), (1, 1), (outputs,), (outputs, 1))
    groups = scales.shape[1] if len(scales.shape) == 2 else 1
    grouped = scales.shape == (outputs, groups) and groups > 0
    grouped = grouped and (order is not None or inputs % groups == 0)
    _check(single or grouped, "weight_scale has another shape")
    if order is not None:
        _check(order.shape == (inputs,) and order.dtype == _I4, "weight_g_idx has another shape")
        indices = order.read()
        in_range = bool(((indices >= 0) & (indices < groups)).all())
        _check(in_range, f"weight_g_idx names groups beyond {groups}")


def _packed_rows(arrays: Arrays, first: int, last: int, *, bits: int, inputs: int) -> NDArray[Any]:
    offset = 1 << (bits - 1)
    numbers = _unpacked(arrays["weight_packed"][first:last], bits, 0, inputs, 1) - offset
    zeros = arrays.get("weight_zero_point")
    if zeros is not None and zeros.dtype == _I4:
        zeros = _unpacked(zeros, bits, first, last, 0) - offset
    elif zeros is not None:
        zeros = zeros[first:last].astype(np.int32)
    return _scaled(numbers, arrays, zeros, first, last)


def _scaled(
    numbers: NDArray[Any],
    arrays: Arrays,
    zeros: NDArray[Any] | None,
    first: int,
    last: int,
) -> NDArray[Any]:
    """Integers [rows, in], less their zero points [rows, groups], times their scales."""
    scales, inputs = float32(arrays["weight_scale"]), numbers.shape[1]
    scales = scales.reshape(-1, 1) if scales.ndim < 2 else scales
    scales = scales[first:last] if len(scales) > 1 else scales
    order = arrays.get("weight_g_idx")
    if order is None:
        order = np.arange(inputs) // (inputs // scales.shape[1])
    if zeros is not None:
        numbers = numbers - zeros[:, order if zeros.shape[1] > 1 else np.zeros_like(order)]
    result: NDArray[Any] = numbers.astype(np.float32)
    result *= scales[:, order] if scales.shape[1] > 1 else scales
    return result


def _int8(parts: Parts) -> PackedTensor:
    """compressed-tensors' int-quantized, and ModelOpt's W8A16."""
    shape, zeros = parts["weight"].shape, parts.get("weight_zero_point")
    _check(len(shape) == 2, "expected a matrix")
    _check_scales(parts, *shape)
    groups = parts["weight_scale"].shape[1] if len(parts["weight_scale"].shape) == 2 else 1
    fits = zeros is None or (zeros.dtype == _I1 and zeros.shape in ((shape[0], groups), (1,)))
    _check(fits, "weight_zero_point has another shape")
    return PackedTensor.of((shape[0], shape[1]), parts, _int8_rows)


def _int8_rows(arrays: Arrays, first: int, last: int) -> NDArray[Any]:
    zeros = arrays.get("weight_zero_point")
    if zeros is not None:
        zeros = zeros.reshape(-1, 1) if zeros.ndim < 2 else zeros
        zeros = (zeros[first:last] if len(zeros) > 1 else zeros).astype(np.int32)
    return _scaled(arrays["weight"][first:last].astype(np.int32), arrays, zeros, first, last)


def _fp4(main: str, group: int, extra: str, parts: Parts) -> PackedTensor:
    """Numbers of e2m1, two in a byte. extra: the scale of all groups, "" for none."""
    stored, scales = parts[main], parts["weight_scale"]
    _check(len(stored.shape) == 2, "expected a matrix")
    outputs, inputs = stored.shape[0], 2 * stored.shape[1]
    _check(inputs % group == 0, f"{inputs} inputs are not groups of {group}")
    _check(scales.shape == (outputs, inputs // group), "weight_scale has another shape")
    kinds = (FLOAT8,) if extra else (_U1, E8M0)
    _check(scales.dtype in kinds, f"weight_scale is not {dtype_name(kinds[0])}")
    if extra:
        _check(parts[extra].shape in ((), (1,)), f"{extra} is not one number")
        _check_float(parts[extra], extra)
    rows = partial(_fp4_rows, main=main, group=group, extra=extra)
    return PackedTensor.of((outputs, inputs), parts, rows)


def _fp4_rows(
    arrays: Arrays, first: int, last: int, *, main: str, group: int, extra: str
) -> NDArray[Any]:
    stored = arrays[main][first:last]
    values = np.take(fp4_pairs(), stored, axis=0).reshape(len(stored), -1, group)
    scales = power_or_float(arrays["weight_scale"][first:last])
    if extra == _GLOBAL_SCALE:  # by which the scales were multiplied
        scales = scales / float32(arrays[extra]).reshape(())
    elif extra:
        scales = scales * float32(arrays[extra]).reshape(())
    values *= scales[:, :, None]
    result: NDArray[Any] = values.reshape(len(stored), -1)
    return result


def power_or_float(scales: NDArray[Any]) -> NDArray[Any]:
    """Scales as float32; bytes and e8m0 are exponents of two with a bias of 127."""
    if scales.dtype in (_U1, E8M0):
        exponents = scales.view(_U1).astype(np.int32) - _EXPONENT_BIAS
        powers: NDArray[Any] = np.ldexp(np.float32(1), exponents)
        return powers
    return float32(scales)


_GLOBAL_SCALE, _SCALE_2 = "weight_global_scale", "weight_scale_2"
INT8 = WeightFormat(
    "int8", "weight", _I1, ("weight_scale",), ("weight_zero_point", "weight_g_idx"), _int8
)
NVFP4_PACKED = WeightFormat(
    *("nvfp4", "weight_packed", _U1, ("weight_scale", _GLOBAL_SCALE), ()),
    partial(_fp4, "weight_packed", 16, _GLOBAL_SCALE),
)
MXFP4_PACKED = WeightFormat(
    *("mxfp4", "weight_packed", _U1, ("weight_scale",), ()),
    partial(_fp4, "weight_packed", 32, ""),
)
NVFP4 = WeightFormat(
    "nvfp4", "weight", _U1, ("weight_scale", _SCALE_2), (), partial(_fp4, "weight", 16, _SCALE_2)
)


def _bnb_int8(parts: Parts) -> PackedTensor:
    shape = parts["weight"].shape
    _check(len(shape) == 2 and parts["SCB"].shape == (shape[0],), "SCB has another shape")
    _check_float(parts["SCB"], "SCB")
    order = parts.get("weight_format")
    _check(order is None or not order.read().any(), "weight_format is not that of rows")
    return PackedTensor.of((shape[0], shape[1]), parts, _bnb_int8_rows)


def _bnb_int8_rows(arrays: Arrays, first: int, last: int) -> NDArray[Any]:
    scales = float32(arrays["SCB"][first:last, None]) / np.float32(_INT8_SCALE)
    result: NDArray[Any] = arrays["weight"][first:last].astype(np.float32)
    result *= scales
    return result


BNB_INT8 = WeightFormat("LLM.int8", "weight", _I1, ("SCB",), ("weight_format",), _bnb_int8)


def _bnb_fp4(parts: Parts) -> PackedTensor:
    """bitsandbytes' nf4 and fp4: codes of four bits, the high half of a byte first.

    absmax holds a scale for every `blocksize` codes; with double quantization, it holds bytes,
    which stand for numbers of nested_quant_map times a scale of their own plus an offset.
    """
    key = next((f"weight.{key}" for key in _QUANT_STATES if f"weight.{key}" in parts), "")
    _check(bool(key), "weight.quant_state is missing")
    _check(parts[key].nbytes <= _MAX_STATE_BYTES, f"{key} is too long")
    try:
        state = json.loads(parts[key].read().tobytes())
        outputs, inputs = (int(size) for size in state["shape"])
        block = int(state["blocksize"])
        nested = int(state.get("nested_blocksize") or 0)
        offset = float(state.get("nested_offset") or 0.0)
    except (KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{key} is damaged: {error!r}") from error
    _check(min(outputs, inputs, block) > 0 and nested >= 0, f"{key} has impossible sizes")
    count = outputs * inputs
    _check(parts["weight"].nbytes == -(-count // 2), f"the shape {outputs, inputs} does not fit")
    blocks, scales = -(-count // block), parts["weight.absmax"]
    _check(scales.shape == (blocks,), f"weight.absmax does not have {blocks} scales")
    _check(parts["weight.quant_map"].shape == (_NUM_CODES,), "weight.quant_map has another shape")
    _check_float(parts["weight.quant_map"], "weight.quant_map")
    if nested:
        both = [parts.get(f"weight.nested_{key}") for key in ("absmax", "quant_map")]
        shapes = [None if part is None else part.shape for part in both]
        _check(shapes == [(-(-blocks // nested),), (256,)], "the nested scales do not fit")
    kinds = (_U1,) if nested else FLOATS
    _check(scales.dtype in kinds, "weight.absmax has another type")
    rows = partial(_bnb_fp4_rows, inputs=inputs, block=block, nested=nested, offset=offset)
    return PackedTensor.of((outputs, inputs), parts, rows)


def _bnb_fp4_rows(
    arrays: Arrays, first: int, last: int, *, inputs: int, block: int, nested: int, offset: float
) -> NDArray[Any]:
    start, stop = first * inputs, last * inputs
    stored = arrays["weight"].reshape(-1)[start // 2 : -(-stop // 2)]
    codes = np.stack([stored >> 4, stored & 15], axis=1).reshape(-1)
    codes = codes[start % 2 : start % 2 + stop - start]
    index = np.arange(start // block, (stop - 1) // block + 1)
    scales = arrays["weight.absmax"][index]
    if nested:
        table, outer = arrays["weight.nested_quant_map"], arrays["weight.nested_absmax"]
        scales = float32(table)[scales] * float32(outer)[index // nested] + np.float32(offset)
    spread = float32(scales)[np.arange(start, stop) // block - index[0]]
    values: NDArray[Any] = float32(arrays["weight.quant_map"])[codes]
    values *= spread
    return values.reshape(-1, inputs)


BNB_FP4 = WeightFormat(
    "four bits of bitsandbytes",
    "weight",
    _U1,
    ("weight.absmax", "weight.quant_map"),
    tuple(f"weight.{key}" for key in ("nested_absmax", "nested_quant_map", *_QUANT_STATES)),
    _bnb_fp4,
)
