"""Every kernel compiles for the GPUs it is meant for; the compiler needs no device."""

from __future__ import annotations

import itertools

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from launcher_scripts.kernels import (  # noqa: E402
    attention_kernels,
    gemv_kernel,
    int8_kernels,
    row_kernels,
)

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = ("fp32", "bf16", "fp16")


def compile_kernel(kernel, pointers: dict[str, str], numbers: dict[str, str], constants) -> str:
    """The kernel's PTX; raises what the compiler finds wrong."""
    signature = {name: f"*{kind}" for name, kind in pointers.items()} | numbers
    signature |= dict.fromkeys(constants, "constexpr")
    ordered = {name: signature[name] for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=ordered, constexprs=places)
    return triton.compile(source, target=HOPPER).asm["ptx"]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("gated", [False, True])
def test_gemv(dtype, gated):
    pointers = dict.fromkeys(("x", "weight", "gate_weight", "bias", "gate_bias"), dtype)
    pointers |= {"residual": "fp32", "out": "fp32"}
    constants = {
        "IN": 768,
        "BIAS": True,
        "ACTIVATION": 2,
        "GATED": gated,
        "RESIDUAL": not gated,
        "ROWS": 2,
        "BLOCK": 256,
    }
    ptx = compile_kernel(gemv_kernel.gemv, pointers, {"out_size": "i32"}, constants)
    assert ".visible .entry gemv" in ptx


@pytest.mark.parametrize("dtype", TYPES)
def test_widen(dtype):
    pointers = {"weight": "i8", "scale": "fp32", "out": dtype}
    assert compile_kernel(int8_kernels.widen, pointers, {"size": "i32"}, {"BLOCK": 1024})


def test_look_up_and_argmax():
    pointers = {"ids": "i64", "table": "bf16", "out": "fp32"}
    numbers = dict.fromkeys(("first_id", "held", "size"), "i32")
    assert compile_kernel(row_kernels.look_up, pointers, numbers, {"BLOCK": 64})
    pointers = {"logits": "fp32", "values": "fp32", "places": "i32"}
    numbers = dict.fromkeys(("stride", "size"), "i32")
    assert compile_kernel(row_kernels.block_argmax, pointers, numbers, {"BLOCK": 1024})
    pointers = {"values": "fp32", "places": "i32", "out": "i64"}
    assert compile_kernel(row_kernels.final_argmax, pointers, {"blocks": "i32"}, {"BLOCK": 64})


@pytest.mark.parametrize("kind", [1, 2])
def test_normalize(kind):
    pointers = {"x": "fp32", "gain": "fp32", "bias": "fp32", "out": "bf16"}
    numbers = {"size": "i32", "eps": "fp32"}
    assert compile_kernel(row_kernels.normalize, pointers, numbers, {"KIND": kind, "BLOCK": 1024})


@pytest.mark.parametrize(("dtype", "half"), list(itertools.product(TYPES, (0, 8, 32))))
def test_rotate_and_store(dtype, half):
    pointers = dict.fromkeys(("qkv", "query", "keys", "values"), dtype)
    pointers |= {"slots": "i64", "cosines": "fp32", "sines": "fp32"}
    constants = {"HEADS": 8, "KV_HEADS": 2, "SIZE": 64, "HALF": half, "BLOCK": 64}
    assert compile_kernel(row_kernels.rotate_and_store, pointers, {"pool_tokens": "i32"}, constants)


@pytest.mark.parametrize(
    ("dtype", "splits", "relative"), list(itertools.product(TYPES, (1, 4), (False, True)))
)
def test_attention(dtype, splits, relative):
    pointers = dict.fromkeys(("query", "keys", "values", "out"), dtype)
    pointers |= dict.fromkeys(("starts", "lengths", "positions"), "i64")
    pointers |= dict.fromkeys(("slopes", "bias", "partial", "weights"), "fp32")
    shape = {"HEADS": 8, "SIZE": 48, "BLOCK": 64, "SPLITS": splits}
    constants = shape | {"GROUP": 4, "ALIBI": splits > 1, "RELATIVE": relative, "TILE": 64}
    numbers = {"pool_tokens": "i32", "scale": "fp32", "reach": "i32"}
    assert compile_kernel(attention_kernels.attend, pointers, numbers, constants)
    merged = {"partial": "fp32", "weights": "fp32", "out": dtype}
    assert compile_kernel(
        attention_kernels.merge_splits, merged, {}, shape | {"SPLIT_BLOCK": splits}
    )
