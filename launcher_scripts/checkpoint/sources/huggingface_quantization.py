"""Quantized weights of a Hugging Face checkpoint: which settings mean which formats.

The settings are quantization_config of config.json, or a file of its own (FILES). Every setting is
obeyed or refused by name. FP8 (e4m3) is dequantized here: numbers times a scale of the tensor, of
each output channel, or of each block, see
https://huggingface.co/docs/transformers/quantization/finegrained_fp8. Packed formats are those of
packed_weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.formats.source_tensor import (
    FLOAT8,
    FLOATS,
    SourceTensor,
    Workspace,
    widened,
)
from launcher_scripts.checkpoint.sources.huggingface_raw import unknown_keys
from launcher_scripts.checkpoint.sources.huggingface_stacked_experts import Mxfp4Scheme
from launcher_scripts.checkpoint.sources.packed_weights import (
    BNB_FP4,
    BNB_INT8,
    INT8,
    MXFP4_PACKED,
    NVFP4,
    NVFP4_PACKED,
    WeightFormat,
    ZeroBiases,
    awq,
    gptq,
    pack_quantized,
    power_or_float,
)
from launcher_scripts.common.errors import CheckpointError, Problems

KEY = "quantization_config"
SCALES = ("weight_scale", "weight_scale_inv")  # beside a weight; both are multiplied
# Endings of scales that round inputs and keys and values, which the engine does in its own way.
OF_ACTIVATIONS = (
    *(".input_scale", ".output_scale", ".activation_scale"),
    *(".input_global_scale", ".input_zero_point", ".output_zero_point"),
    *(".q_scale", ".k_scale", ".v_scale"),
)
# FP8 of blocks of one row, with a power of two each: the microscaling format.
_MX_BLOCK = (1, 32)
_PB_BLOCK = 128  # of ModelOpt's FP8_PB_WO, without a group_size


@dataclass(frozen=True)
class Fp8Scheme:
    """The way a checkpoint stores weights in FP8. block: rows and columns that share a scale"""

    note = "weights stored in fp8 are widened; scales of activations are left out"

    block: tuple[int, int] | None = None

    def applied(self, tensors: dict[str, SourceTensor], problems: Problems) -> None:
        """Put weights as wide as they are in place of those in FP8, and take the scales away."""
        for name in [name for name in tensors if name.endswith(OF_ACTIVATIONS)]:
            del tensors[name]
        for name, base in list(tensors.items()):
            if base.dtype != FLOAT8 or name.endswith(SCALES):
                continue
            scale_names = [name.removesuffix("weight") + scale for scale in SCALES]
            scales = [
                tensors.pop(scale_name) for scale_name in scale_names if scale_name in tensors
            ]
            if len(scales) != 1:
                problems.add(f"{name} is in fp8 and has {len(scales)} scales", choices=scale_names)
            elif (block := self._block(base.shape, scales[0])) is None:
                problems.add(
                    f"the scales of {name} do not fit its shape {base.shape}", got=scales[0].shape
                )
            else:
                float32_type = np.dtype("<f4")
                tensors[name] = ScaledTensor(
                    base.shape, float32_type, base.pieces, base, scales[0], block
                )

    def _block(self, shape: tuple[int, ...], stored: SourceTensor) -> tuple[int, int] | None:
        """The rows and columns that share one of the scales; None if these do not fit."""
        if len(shape) != 2:
            return None
        rows, columns = shape
        scales, blocks_only = stored.shape, stored.dtype not in FLOATS  # powers of two
        if len(scales) == 4 and scales[1::2] == (1, 1):  # ModelOpt's blocks
            scales = scales[::2]
        if scales in ((), (1,), (1, 1)) and not blocks_only:
            return rows, columns
        if scales in ((rows,), (rows, 1)) and not blocks_only:
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
        result = memory.array(name, self.shape, self.dtype)
        values = self.base.read(memory, f"{name} fp8")
        scales = power_or_float(self.scales.read(memory, f"{name} scales"))
        scales = scales.reshape(-(-self.shape[0] // high), -1)
        for number, row in enumerate(range(0, self.shape[0], high)):
            across = np.repeat(scales[number], wide)[: self.shape[1]]
            np.multiply(widened(values[row : row + high]), across, out=result[row : row + high])
        return result


Scheme = Fp8Scheme | Mxfp4Scheme | WeightFormat | ZeroBiases


def weight_schemes(
    config: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]], problems: Problems
) -> tuple[Scheme, ...]:
    """The formats of a checkpoint's quantized weights; problems note unsupported settings.

    config: config.json
    files:  those of FILES that are present
    """
    settings = config.get(KEY)
    if settings is None:
        settings = next((FILES[name](content) for name, content in files.items()), None)
    if settings is None:
        return ()
    method = settings.get("quant_method") if isinstance(settings, Mapping) else settings
    if method not in _METHODS:
        problems.add(f"{KEY}: unknown quant_method", got=method, choices=_METHODS)
        return ()
    return _METHODS[method](_Quantization(settings, problems))


def _of_modelopt(content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Without an algorithm only keys and values are quantized, or nothing is."""
    section = content.get("quantization")
    section = section if isinstance(section, Mapping) else {}
    return {"quant_method": "modelopt", **section} if section.get("quant_algo") else None


# Files with the settings of tools that leave config.json as it is.
FILES: dict[str, Callable[[Mapping[str, Any]], Mapping[str, Any] | None]] = {
    "hf_quant_config.json": _of_modelopt,
    "quantize_config.json": lambda content: {"quant_method": "gptq", **content},
    "quant_config.json": lambda content: {"quant_method": "awq", **content},
}


@dataclass(frozen=True)
class _Quantization:
    """Settings of quantization_config, or a section of it; problems note unsupported ones.

    name: of the section, for problems
    """

    settings: Mapping[str, Any]
    problems: Problems
    name: str = KEY

    def only(self, name: str, *choices: Any) -> None:
        """Refuse anything but these values, and null."""
        value = self.settings.get(name)
        if value not in (None, *choices):
            self.problems.add(f"{self.name}.{name} is not supported", got=value, choices=choices)

    def reject_other_keys(self, *supported: str) -> None:
        """Refuse keys that are none of these."""
        for name in unknown_keys(self.settings, supported):
            self.problems.add(f"{self.name}.{name} is not known here", got=self.settings[name])

    def size(self, name: str, *more: int) -> int:
        """A number from 1 on, or one of `more`."""
        value = self.settings.get(name)
        if type(value) is int and (value > 0 or value in more):
            return value
        self.problems.add(f"{self.name}.{name} must be a size", got=value)
        return 1

    def group_size(self, name: str) -> int:
        """The number of inputs that share a scale; -1: all."""
        return self.size(name, -1)

    def sizes(self, name: str) -> tuple[int, int] | None:
        value = self.settings.get(name)
        if value is None:
            return None
        sizes = value if isinstance(value, list) else []
        if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
            self.problems.add(f"{self.name}.{name} must be two sizes", got=value)
            return None
        return sizes[0], sizes[1]


def _fine_grained(config: _Quantization) -> tuple[Scheme, ...]:
    config.only("fmt", "e4m3", "float8_e4m3fn")
    supported = ("quant_method", "fmt", "weight_block_size", "activation_scheme", "scale_fmt")
    more = ("modules_to_not_convert", "ignored_layers", "activation_scale_ub")
    config.reject_other_keys(*supported, *more)
    return (Fp8Scheme(config.sizes("weight_block_size")),)


def _compressed_tensors(config: _Quantization) -> tuple[Scheme, ...]:
    config.only("format", *_COMPRESSED, "mixed-precision")
    config.only("quantization_status", "compressed")
    problems = config.problems
    _Quantization(config.settings.get("sparsity_config") or {}, problems).only("format", "dense")
    of_activations = ("kv_cache_scheme", "global_compression_ratio", "version", "ignore")
    supported = (
        "quant_method",
        "format",
        "quantization_status",
        "sparsity_config",
        "config_groups",
    )
    config.reject_other_keys(*supported, *of_activations)
    groups = config.settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        problems.add(f"{KEY}.config_groups must be a mapping of groups", got=groups)
        return ()
    schemes: list[Scheme] = []
    bits: dict[int, bool] = {}  # of packed integers -> they are symmetric
    for name, group in groups.items():
        schemes += _group(config, f"config_groups.{name}", group, bits)
    if bits:
        schemes.append(pack_quantized(bits))
    return _with_one_fp8(schemes, problems)


def _with_one_fp8(schemes: Iterable[Scheme], problems: Problems) -> tuple[Scheme, ...]:
    """Each scheme once; of those of FP8, the one that also knows the blocks."""
    different = list(dict.fromkeys(schemes))
    fp8 = [scheme for scheme in different if isinstance(scheme, Fp8Scheme)]
    blocks = [scheme for scheme in fp8 if scheme.block is not None]
    if len(blocks) > 1:
        problems.add(f"{KEY} has several block sizes", got=[scheme.block for scheme in blocks])
    others = [scheme for scheme in different if not isinstance(scheme, Fp8Scheme)]
    return (*(blocks or fp8)[:1], *others)


_FLOAT8 = ("tensor", "channel", "block")
# Format -> the type of its weights, the numbers of bits and the strategies of scales.
_COMPRESSED: dict[str, tuple[str, tuple[int, ...], tuple[str, ...]]] = {
    "float-quantized": ("float", (8,), _FLOAT8),
    "naive-quantized": ("float", (8,), _FLOAT8),
    "int-quantized": ("int", (8,), ("tensor", "channel", "group")),
    "pack-quantized": ("int", (2, 4, 8), ("tensor", "channel", "group")),
    "nvfp4-pack-quantized": ("float", (4,), ("tensor_group",)),
    "mxfp4-pack-quantized": ("float", (4,), ("group",)),
    "mxfp8-quantized": ("float", (8,), ("group",)),
}


def _group(config: _Quantization, name: str, group: Any, bits: dict[int, bool]) -> Iterator[Scheme]:
    """The format of a group of modules; that of packed integers is noted in `bits`."""
    problems = config.problems
    raw = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(raw, Mapping):
        problems.add(f"{KEY}.{name} says nothing of weights", got=group)
        return
    kind = group.get("format") or config.settings.get("format") or "float-quantized"
    if kind == "naive-quantized" and raw.get("type") == "int":
        kind = "int-quantized"
    if kind not in _COMPRESSED:
        problems.add(f"{KEY}.{name}.format is not supported", got=kind, choices=_COMPRESSED)
        return
    numbers, sizes, strategies = _COMPRESSED[kind]
    weights = _Quantization(raw, problems, f"{KEY}.{name}.weights")
    weights.only("type", numbers)
    weights.only("num_bits", *sizes)
    weights.only("strategy", *strategies)
    if numbers == "float":
        weights.only("symmetric", True)
    weights.only("dynamic", False)
    weights.reject_other_keys(*_WEIGHT_SETTINGS)
    symmetric = raw.get("symmetric", True) is not False
    match kind:
        case "pack-quantized":
            size = next((size for size in sizes if size == raw.get("num_bits")), sizes[0])
            bits[size] = bits.get(size, True) and symmetric
        case "int-quantized":
            yield INT8
        case "nvfp4-pack-quantized":
            yield NVFP4_PACKED
        case "mxfp4-pack-quantized":
            yield MXFP4_PACKED
        case "mxfp8-quantized":
            yield Fp8Scheme(_MX_BLOCK)
        case _:
            yield Fp8Scheme(weights.sizes("block_structure"))


# What a group's settings of weights may say; those that are not read follow from the tensors.
_WEIGHT_SETTINGS = (
    *("num_bits", "type", "symmetric", "strategy", "block_structure", "dynamic", "group_size"),
    *("actorder", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"),
)


def _modelopt(config: _Quantization) -> tuple[Scheme, ...]:
    config.only("pre_quant_scale", False)
    config.only("has_zero_point", False)
    method = str(config.settings.get("quant_algo")).upper()
    layers = config.settings.get("quantized_layers")
    methods = {method}
    if method == "MIXED_PRECISION":
        layers = layers if isinstance(layers, Mapping) else {}
        sections = [layer for layer in layers.values() if isinstance(layer, Mapping)]
        methods = {str(layer.get("quant_algo")).upper() for layer in sections}
        for layer in sections:
            _Quantization(layer, config.problems).only("pre_quant_scale", False)
            _Quantization(layer, config.problems).only("has_zero_point", False)
        if not sections:
            config.problems.add(f"{KEY}.quantized_layers is missing", got=layers)
    schemes: list[Scheme] = []
    for name in sorted(methods):
        if name not in _MODELOPT:
            choices = [*_MODELOPT, "MIXED_PRECISION"]
            config.problems.add(f"{KEY}.quant_algo is not supported", got=name, choices=choices)
            continue
        schemes.append(_MODELOPT[name])
    return _with_one_fp8(schemes, config.problems)


_MODELOPT: dict[str, Scheme] = {
    "FP8": Fp8Scheme(),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8Scheme(),
    "FP8_PB_WO": Fp8Scheme((_PB_BLOCK, _PB_BLOCK)),
    "MXFP8": Fp8Scheme(_MX_BLOCK),
    "NVFP4": NVFP4,
    "W4A16_NVFP4": NVFP4,
    "W8A16": INT8,
}


def _mxfp4(config: _Quantization) -> tuple[Scheme, ...]:
    config.reject_other_keys("quant_method", "modules_to_not_convert")
    return (Mxfp4Scheme(),)


def _gptq(config: _Quantization) -> tuple[Scheme, ...]:
    config.only("bits", 2, 3, 4, 8)
    formats = {config.settings.get(key) for key in ("checkpoint_format", "format")} - {None}
    if len(formats) > 1 or not formats <= {"gptq", "gptq_v2"}:
        message = f"{KEY}.checkpoint_format or format is not supported"
        config.problems.add(message, got=sorted(map(str, formats)), choices=["gptq", "gptq_v2"])
    config.only("pack_dtype", "int32")
    config.only("is_marlin_format", False)
    config.only("lm_head", False, True)
    config.only("method", "gptq")
    config.reject_other_keys(*_GPTQ_SETTINGS, *_CALIBRATION)
    _reject_dynamic(config)
    bits = config.size("bits")
    less = (0, ()) if "gptq_v2" in formats else _less_one(bits, config.settings.get("meta"))
    return gptq(bits, config.group_size("group_size"), *less), ZeroBiases()


# GPTQModel takes these from words of three-bit zero points in turn, whose ones begin elsewhere.
_GPTQMODEL_OF_3 = (0x24924924, 0x92492492, 0x49249249)


def _less_one(bits: int, meta: Any) -> tuple[int, tuple[int, ...]]:
    """Return what zero points of checkpoint_format gptq are stored less by: each, and words of them
    in turn. In a word a number that was 0 borrows from the next one.

    meta: of the settings, which names the tool
    """
    if bits != 3:
        return 0, (sum(1 << shift for shift in range(0, 32, bits)),)
    tools = str(meta.get("quantizer") if isinstance(meta, Mapping) else None)
    return (0, _GPTQMODEL_OF_3) if "gptqmodel" in tools.lower() else (1, ())


def _reject_dynamic(config: _Quantization) -> None:
    """Refuse settings of single modules, but for those that leave modules out."""
    dynamic = config.settings.get("dynamic") or {}
    if not isinstance(dynamic, Mapping) or not all(str(key).startswith("-:") for key in dynamic):
        message = f"{KEY}.dynamic may leave modules out, and not change their settings"
        config.problems.add(message, got=dynamic, choices=["-:<pattern>"])


_GPTQ_SETTINGS = (
    *("quant_method", "method", "bits", "group_size", "checkpoint_format", "format", "pack_dtype"),
    *("dynamic", "is_marlin_format", "lm_head"),
)
# How the numbers were chosen, and which kernels multiply them.
_CALIBRATION = (
    *("desc_act", "sym", "static_groups", "true_sequential", "damp_percent"),
    *("damp_auto_increment", "mse", "act_group_aware", "hyb_act", "model_seqlen", "meta", "uuid"),
    *("model_name_or_path", "model_file_base_name", "quantizer", "dataset", "tokenizer"),
    *("backend", "use_exllama", "disable_exllama", "exllama_config", "max_input_length"),
    *("use_cuda_fp16", "cache_block_outputs", "batch_size", "pad_token_id"),
    *("module_name_preceding_first_block", "modules_in_block_to_quantize"),
    *("block_name_to_quantize", "offload_to_disk", "offload_to_disk_path", "pack_impl"),
)


def _awq(config: _Quantization) -> tuple[Scheme, ...]:
    version = str(config.settings.get("version") or "gemm").lower()
    if version != "gemm":
        config.problems.add(f"{KEY}.version is not supported", got=version, choices=["gemm"])
    config.only("format", "gemm")
    config.only("checkpoint_format", "gemm")
    config.only("method", "awq")
    _reject_dynamic(config)
    config.only("pack_dtype", "int32")
    config.only("zero_point", True)
    config.only("bits", 4)
    config.only("w_bit", 4)
    config.reject_other_keys(*_AWQ_SETTINGS, *_CALIBRATION)
    name = "q_group_size" if "q_group_size" in config.settings else "group_size"
    return (awq(config.group_size(name)),)


_AWQ_SETTINGS = (
    *("quant_method", "version", "zero_point", "bits", "w_bit", "group_size", "q_group_size"),
    *("modules_to_not_convert", "do_fuse", "modules_to_fuse", "fuse_max_seq_len"),
    *("format", "checkpoint_format", "method", "pack_dtype", "lm_head", "dynamic"),
)


def _bitsandbytes(config: _Quantization) -> tuple[Scheme, ...]:
    config.only("bnb_4bit_quant_storage", "uint8")
    config.only("bnb_4bit_quant_type", "nf4", "fp4")
    config.reject_other_keys(*_BNB_SETTINGS)
    if bool(config.settings.get("load_in_4bit")) == bool(config.settings.get("load_in_8bit")):
        got = {key: config.settings.get(key) for key in ("load_in_4bit", "load_in_8bit")}
        config.problems.add(f"{KEY} must set one of load_in_4bit and load_in_8bit", got=got)
    return (BNB_FP4,) if config.settings.get("load_in_4bit") else (BNB_INT8,)


_BNB_SETTINGS = (
    *("quant_method", "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_storage"),
    *("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype"),
    *("llm_int8_threshold", "llm_int8_skip_modules", "llm_int8_has_fp16_weight"),
    *("llm_int8_enable_fp32_cpu_offload", "_load_in_4bit", "_load_in_8bit"),
)
_METHODS: dict[Any, Callable[[_Quantization], tuple[Scheme, ...]]] = {
    "fp8": _fine_grained,
    "fbgemm_fp8": _fine_grained,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
}


def check_no_weight_is_left(tensors: Mapping[str, SourceTensor]) -> None:
    """Raises CheckpointError for weights in FP8 of which nothing says how they are scaled."""
    left = [name for name, tensor in tensors.items() if tensor.dtype == FLOAT8]
    if left:
        raise CheckpointError(f"{len(left)} tensors are in fp8, and {KEY} is missing: {left[0]}")
