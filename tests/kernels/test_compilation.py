"""Every kernel compiles for the GPUs it is meant for; the compiler needs no device."""

from __future__ import annotations

import itertools

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from launcher_scripts.kernels import attention_kernels, gemv_kernel, row_kernels  # noqa: E402

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


@pytest.mark.parametrize(
    ("dtype", "norm", "gated"), list(itertools.product(TYPES[:2], (0, 1, 2), (False, True)))
)
def test_gemv(dtype, norm, gated):
    pointers = dict.fromkeys(("gain", "sums", "gate_sums", "residual"), "fp32")
    pointers |= dict.fromkeys(("offsets", "gate_offsets"), "fp32")
    pointers |= {"x": "fp32" if norm else dtype, "weight": dtype, "gate_weight": dtype}
    constants = {
        "IN": 768,
        "NORM": norm,
        "OFFSET": norm != 2,
        "ACTIVATION": 2 * norm,
        "GATED": gated,
        "RESIDUAL": norm == 0,
        "ROWS": 2,
        "BLOCK": 256,
    }
    numbers = {"out_size": "i32", "eps": "fp32"}
    ptx = compile_kernel(gemv_kernel.gemv, pointers | {"out": dtype}, numbers, constants)
    assert ".visible .entry gemv" in ptx


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


@pytest.mark.parametrize(("dtype", "splits"), list(itertools.product(TYPES, (1, 4))))
def test_attention(dtype, splits):
    pointers = dict.fromkeys(("query", "keys", "values", "out"), dtype)
    pointers |= dict.fromkeys(("starts", "lengths"), "i64")
    pointers |= dict.fromkeys(("slopes", "partial", "weights"), "fp32")
    shape = {"HEADS": 8, "SIZE": 48, "BLOCK": 64, "SPLITS": splits}
    constants = shape | {"GROUP": 4, "ALIBI": splits > 1, "TILE": 64}
    numbers = {"pool_tokens": "i32", "scale": "fp32"}
    assert compile_kernel(attention_kernels.attend, pointers, numbers, constants)
    merged = {"partial": "fp32", "weights": "fp32", "out": dtype}
    assert compile_kernel(
        attention_kernels.merge_splits, merged, {}, shape | {"SPLIT_BLOCK": splits}
    )
