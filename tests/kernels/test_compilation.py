"""Every kernel compiles for the GPUs it is meant for; the compiler needs no device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from launcher_scripts.kernels.cuda import (  # noqa: E402
    attention_tile,
    beams,
    candidates,
    decode_attention,
    delta_scans,
    dot,
    elementwise,
    embedding,
    gemv,
    hopper_attention,
    lora,
    many_rows,
    norm,
    peer_buffers,
    peer_rows,
    prompt_attention,
    qkv,
    sampling,
)

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = ("fp32", "bf16", "fp16")
# Compute type and that of the cache.
CACHES = [(dtype, kept) for dtype in TYPES for kept in (dtype, "fp8e4nv")]


def compile_kernel(
    kernel, pointers: dict[str, str], numbers: dict[str, str], constants, **options: int
) -> str:
    """The kernel's PTX; raises what the compiler finds wrong."""
    return code_of(kernel, pointers, numbers, constants, **options)["ptx"]


def code_of(kernel, pointers, numbers, constants, **options: int) -> dict[str, str]:
    """The kernel in every form it has on its way."""
    signature = {name: f"*{kind}" for name, kind in pointers.items()} | numbers
    signature |= dict.fromkeys(constants, "constexpr")
    ordered = {name: signature[name] for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=ordered, constexprs=places)
    return triton.compile(source, target=HOPPER, options=options).asm


BYTES = ("i8", "fp8e4nv")
NO_LORA = dict.fromkeys(("lora_up", "lora_inner", "adapters"), "fp32")
# Compute type and that of the weight.
WEIGHTS = [*((dtype, dtype) for dtype in TYPES), *itertools.product(("bf16", "fp32"), BYTES)]
FLAGS = (False, True)
TILE = {"PARTS": 3, "SPREAD": 4, "ROWS": 2, "BLOCK": 256, "ROLLED": False, "USE_PDL": True}


def crossed(cases: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Return all pairs as parameters, of which as many as show every case once are not slow."""
    cases, others = (
        [each if isinstance(each, tuple) else (each,) for each in axis] for axis in (cases, others)
    )
    return [
        pytest.param(
            *case,
            *other,
            marks=[] if (at + at // len(others)) % len(others) == way else [pytest.mark.slow],
        )
        for at, case in enumerate(cases)
        for way, other in enumerate(others)
    ]


@pytest.mark.parametrize(
    ("dtype", "held", "gated", "rolled"),
    crossed(WEIGHTS, list(itertools.product(FLAGS, FLAGS))),
)
def test_gemv(dtype, held, gated, rolled):
    pointers = dict.fromkeys(("x", "rounded"), dtype)
    pointers |= dict.fromkeys(("weight", "gate_weight"), held)
    vectors = ("offsets", "gate_offsets", "sums", "gate_sums", "residual", "gain", "out")
    vectors += ("row_stats", "new_row_stats", "residual_stats", "scales", "gate_scales")
    pointers |= dict.fromkeys(vectors, "fp32") | NO_LORA
    constants = {
        "OUT": 515,
        "IN": 768,
        "NORM": 1,
        "OFFSET": True,
        "ACTIVATION": 2,
        "GATED": gated,
        "RESIDUAL": not gated,
        "ROUNDED": True,
        "PRESCALED": 0 if gated else 1,
        "LORA": None,
        **TILE,
        "ROLLED": rolled,
    }
    ptx = compile_kernel(gemv.gemv, pointers, {"part_eps": "fp32"}, constants)
    assert "griddepcontrol.wait" in ptx


@pytest.mark.parametrize(
    ("dtype", "kept", "half", "rank"), crossed(CACHES, [(0, 0), (8, 64), (32, 16)])
)
def test_gemv_heads(dtype, kept, half, rank):
    pointers = dict.fromkeys(("x", "weight", "query", "lora_up"), dtype)
    pointers |= {"lora_inner": "fp32", "adapters": "i64"}
    pointers |= dict.fromkeys(("keys", "values"), kept)
    pointers |= dict.fromkeys(("scales", "row_stats", "offsets", "sums"), "fp32")
    pointers |= dict.fromkeys(("cosines", "sines"), "fp32")
    pointers |= dict.fromkeys(("slots", "positions"), "i64")
    numbers = {"pool_tokens": "i32"}
    heads = {"HEADS": 8, "KV_HEADS": 2, "SIZE": 64, "HALF": half}
    constants = {"IN": 768, "NORM": 1, "OFFSET": True, **heads, **TILE}
    constants["LORA"] = (768, rank, 512, 640) if rank else None
    assert compile_kernel(qkv.gemv_heads, pointers, numbers, constants)


@pytest.mark.parametrize("dtype", TYPES)
def test_gemv_largest(dtype):
    pointers = dict.fromkeys(("x", "weight"), dtype)
    pointers |= dict.fromkeys(("scales", "row_stats", "offsets", "sums", "largest"), "fp32")
    pointers |= {"places": "i32"}
    constants = {"OUT": 515, "IN": 768, "NORM": 2, "OFFSET": True, **TILE}
    assert compile_kernel(gemv.gemv_largest, pointers, {}, constants)


@pytest.mark.parametrize(("dtype", "weight"), WEIGHTS)
def test_peer_buffers(dtype, weight):
    pointers = {"x": dtype, "weight": weight, "addresses": "i64", "exchanges": "i32"}
    pointers |= {"scales": "fp32", "lora_up": dtype, "lora_inner": "fp32", "adapters": "i64"}
    numbers = dict.fromkeys(("rank", "lane_words"), "i32")
    shared = {"RANKS": 3, "SHARE": 64, "USE_PDL": True}
    constants = {"OUT": 515, "IN": 768, **shared}
    constants |= {"ROLLED": False, "ROWS": 2, "BLOCK": 256}
    for blocks in (None, (515, 16, 515, 515)):
        constants["LORA"] = blocks
        assert compile_kernel(peer_buffers.gemv_to_peers, pointers, numbers, constants)
    vectors = ("offsets", "residual", "residual_stats", "gain", "exact", "row_stats")
    pointers = dict.fromkeys(vectors, "fp32") | {"buffer": "i64", "exchanges": "i32"}
    constants = {"SIZE": 515, "LANES": 4, "OFFSET": True, "PRESCALED": 1, **shared}
    pointers["operand"] = dtype
    own = {"lane_words": "i32", "part_eps": "fp32"}
    ptx = compile_kernel(peer_buffers.add_from_peers, pointers, own, constants)
    assert "ld.volatile.global" in ptx
    pointers = dict.fromkeys(("ids", "tokens", "buffer", "addresses"), "i64")
    pointers |= {"values": "fp32", "exchanges": "i32"}
    constants = {"LANES": 4, **shared}
    assert compile_kernel(peer_buffers.exchange_best, pointers, numbers, constants)


@pytest.mark.parametrize(
    ("dtype", "held", "splits"),
    crossed(list(itertools.product(("bf16", "fp16"), (None, *BYTES))), (1, 4)),
)
def test_dot_rows(dtype, held, splits):
    pointers = dict.fromkeys(("offsets", "gate_offsets"), dtype)
    pointers |= dict.fromkeys(("weight", "gate_weight"), held or dtype)
    pointers["x"] = held if held == "i8" or (dtype == "bf16" and held) else dtype
    pointers |= dict.fromkeys(("steps", "scales", "gate_scales"), "fp32")
    pointers |= {"out": "fp32", "largest": "fp32", "places": "i32"} | NO_LORA
    constants = {
        "OUT": 515,
        "IN": 768,
        "OFFSET": splits == 1,
        "ACTIVATION": 1,
        "GATED": splits == 1,
        "LARGEST": False,
        "SPLITS": splits,
        "PREFETCH": 2,
        "LORA": None,
        "USE_PDL": True,
        "ROWS": 64,
        "BLOCK": 128,
        "BATCH": 16,
    }
    ptx = compile_kernel(dot.dot_rows, pointers, {"count": "i32"}, constants)
    assert "prefetch.global.L2" in ptx.partition("griddepcontrol.wait")[0]


@pytest.mark.parametrize(("splits", "scales"), [(1, "bf16"), (4, "i16")])
def test_packed_dot_rows(splits, scales):
    """Products do not wait for one another, but for those that need their registers."""
    pointers = dict.fromkeys(("weight", "gate_weight"), "u8") | NO_LORA
    pointers |= dict.fromkeys(("scales", "gate_scales"), scales) | {"out": "fp32", "places": "i32"}
    constants = {
        "OUT": 512,
        "IN": 4096,
        "OFFSET": True,
        "ACTIVATION": 4,
        "GATED": splits == 1,
        "LARGEST": False,
        "SPLITS": splits,
        "PREFETCH": 0,
        "LORA": None,
        "USE_PDL": True,
        "ROWS": 128,
        "BLOCK": 256,
        "BATCH": 32,
    }
    known = {*pointers, "count", *constants}
    pointers |= {name: "bf16" for name in dot.dot_rows.arg_names if name not in known}
    numbers = {"count": "i32"}
    code = code_of(dot.dot_rows, pointers, numbers, constants, num_warps=8, num_stages=3)
    products, waits = (code["sass"].count(name) for name in ("HGMMA", "WARPGROUP.DEPBAR"))
    assert products == 4 * waits > 0
    assert "st.local" not in code["ptx"]


@pytest.mark.parametrize("ranks", [0, 2])
def test_add_and_normalize(ranks):
    vectors = ("parts", "offsets", "residual", "gain", "bias", "exact", "operand", "row_stats")
    pointers = dict.fromkeys(vectors, "fp32")
    pointers |= {"buffer": "i64", "exchanges": "i32"}
    numbers = dict.fromkeys(("count", "size", "lane_words"), "i32") | {"eps": "fp32"}
    constants = {"PARTS": 0 if ranks else 4, "RESIDUAL": True, "OFFSET": True, "NORM": 1}
    constants |= {"STATS_PARTS": 0 if ranks else 64}
    constants |= {"RANKS": ranks, "SHARE": 64, "OWNED": 256, "USE_PDL": True, "BLOCK": 1024}
    ptx = compile_kernel(norm.add_and_normalize, pointers, numbers, constants)
    assert ("ld.volatile.global" in ptx) == (ranks > 0)


@pytest.mark.parametrize("kernel", [peer_rows.parts_to_owner, peer_rows.sums_to_peers])
def test_sums_of_rows(kernel):
    pointers = dict.fromkeys(("buffer", "addresses"), "i64") | {"parts": "fp32"}
    pointers |= {"exchanges": "i32"}
    numbers = dict.fromkeys(("rank", "lane_words", "count", "size"), "i32")
    constants = {"RANKS": 3, "SHARE": 64, "USE_PDL": True, "BLOCK": 256, "PARTS": 4, "LANES": 4}
    taken = [
        {name: kind for name, kind in each.items() if name in kernel.arg_names}
        for each in (pointers, numbers, constants)
    ]
    ptx = compile_kernel(kernel, *taken)
    waits, launches = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
    sends_parts = kernel is peer_rows.parts_to_owner
    assert (ptx.index(waits) < ptx.index(launches)) == sends_parts
    assert ("ld.volatile.global" in ptx) != sends_parts


def test_begin_rows():
    pointers = {"table": "bf16", "position_table": "bf16", "exact": "fp32", "rounded": "bf16"}
    pointers |= {"gain": "fp32", "row_stats": "fp32", "block_table": "i32"}
    numbers = dict.fromkeys(("first_id", "held", "padding", "size"), "i32") | {"eps": "fp32"}
    constants = {"SOURCES": True, "POSITIONS": True, "ROUNDED": True, "PRESCALED": 1, "PARTS": 64}
    constants |= {"BLOCK": 1024, "BLOCK_TOKENS": 16}
    known = {*pointers, *numbers, *constants}
    names = embedding.begin_rows.arg_names
    pointers |= {name: "i64" for name in names if name not in known}
    assert compile_kernel(embedding.begin_rows, pointers, numbers, constants)


@pytest.mark.parametrize(("dtype", "held"), crossed(TYPES, BYTES))
def test_widen(dtype, held):
    pointers = {"weight": held, "scale": "fp32", "out": dtype}
    assert compile_kernel(many_rows.widen, pointers, {"size": "i32"}, {"BLOCK": 1024})


@pytest.mark.parametrize("dtype", TYPES)
def test_quantize_rows(dtype):
    pointers = {"x": dtype, "out": "fp8e4nv", "scales": "fp32"}
    assert compile_kernel(many_rows.quantize_rows, pointers, {"size": "i32"}, {"BLOCK": 1024})


def test_what_looks_tokens_up_finds_them_and_copies_them():
    pointers = {"ids": "i64", "table": "bf16", "out": "fp32"}
    numbers = dict.fromkeys(("first_id", "held", "size"), "i32")
    assert compile_kernel(embedding.look_up, pointers, numbers, {"BLOCK": 64})
    pointers = {"logits": "fp32", "values": "fp32", "places": "i32"}
    numbers = dict.fromkeys(("stride", "size"), "i32")
    assert compile_kernel(elementwise.block_argmax, pointers, numbers, {"BLOCK": 1024})
    pointers = {"largest": "fp32", "places": "i32", "values": "fp32"}
    pointers |= dict.fromkeys(("tokens", "column", "slots"), "i64")
    constants = {"KEEP": True, "USE_PDL": True, "BLOCK": 64}
    assert compile_kernel(elementwise.pick_largest, pointers, {"parts": "i32"}, constants)
    pointers = dict.fromkeys(("tokens", "slots", "memory", "written"), "i64")
    numbers = dict.fromkeys(("count", "lines", "width", "padding"), "i32")
    constants = {"USE_PDL": True, "BLOCK": 256}
    assert compile_kernel(embedding.write_line, pointers, numbers, constants)


@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        (beams.find_likeliest, {"COUNT": 8, "ALL_ALLOWED": False, "BLOCK": 1024}),
        (
            beams.rank_search,
            {"WIDTH": 4, "COUNT": 8, "KEPT": 8}
            | {"ROWS": 4, "PARTS": 64, "PLACES": 512, "ORDER": 8},
        ),
        (
            beams.copy_hypotheses,
            {"WIDTH": 4, "ROWS": 4, "AT_ONCE": 8, "SIZE": 128, "HEAD": 128, "BLOCK_TOKENS": 16},
        ),
    ],
)
def test_beam_searches(kernel, constants):
    types = {"pool": "i16", "tokens": "i32", "table": "i32"}
    types |= dict.fromkeys(("logits", "allowed", "found", "sums", "beam_score", "scores"), "fp32")
    constants = constants | {"USE_PDL": True}
    numbers = {"stride", "allowed_stride", "size", "parts", "count"}
    if kernel is beams.copy_hypotheses:
        numbers.add("tokens")
    numbers = dict.fromkeys(numbers & {*kernel.arg_names}, "i32")
    pointers = {
        name: types.get(name, "i64") for name in kernel.arg_names if name not in numbers | constants
    }
    ptx = compile_kernel(kernel, pointers, numbers, constants)
    assert "griddepcontrol.wait" in ptx
    assert "st.local" not in ptx


@pytest.mark.parametrize(
    "kernel",
    [
        candidates.find_maxima,
        sampling.add_shares,
        sampling.add_finer_shares,
        sampling.choose_tokens,
        sampling.process_rows,
    ],
)
def test_sampling(kernel):
    floats = {"logits", "maxima", "log_probs", "temperature", "min_p", "top_p"}
    floats.add("bias_values")
    floats |= {name for name in kernel.arg_names if "_top_p" in name or "top_p_" in name}
    floats |= {name for name in kernel.arg_names if name.endswith("_penalty")}
    narrow = ("candidates", "counts", "table", "bias_ids", "word_ids", "word_lengths")
    integers = dict.fromkeys(narrow, "i32")
    numbers = dict.fromkeys({"stride", "size", "parts"} & {*kernel.arg_names}, "i32")
    constants = {
        name: value
        for name, value in {"USE_PDL": True, "LEVEL": 2, "BLOCK": 1024}.items()
        if name in kernel.arg_names
    }
    if kernel is sampling.process_rows:
        constants |= {"LISTED": 512, "BLOCK_TOKENS": 16}
    pointers = {
        name: "fp32" if name in floats else integers.get(name, "i64")
        for name in kernel.arg_names
        if name not in numbers | constants
    }
    ptx = compile_kernel(kernel, pointers, numbers, constants)
    assert "griddepcontrol.wait" in ptx
    assert "st.local" not in ptx


@pytest.mark.parametrize("kind", [1, 2])
def test_normalize(kind):
    pointers = {"x": "fp32", "gain": "fp32", "bias": "fp32", "out": "bf16"}
    numbers = {"size": "i32", "eps": "fp32"}
    assert compile_kernel(
        norm.normalize, pointers, numbers, {"KIND": kind, "USE_PDL": True, "BLOCK": 1024}
    )


@pytest.mark.parametrize(("dtype", "kept", "half"), crossed(CACHES, (0, 8, 32)))
def test_rotate_and_store(dtype, kept, half):
    pointers = dict.fromkeys(("qkv", "query"), dtype) | dict.fromkeys(("keys", "values"), kept)
    vectors = ("cosines", "sines", "query_gain", "key_gain", "query_bias", "key_bias")
    pointers |= dict.fromkeys(("slots", "positions"), "i64") | dict.fromkeys(vectors, "fp32")
    numbers = {"pool_tokens": "i32", "query_eps": "fp32", "key_eps": "fp32"}
    constants = {"HEADS": 8, "KV_HEADS": 2, "SIZE": 64, "HALF": half, "BLOCK": 64, "AT_ONCE": 16}
    step = half == 8
    constants |= {"NORM": int(step), "STEP": step, "USE_PDL": step}
    assert compile_kernel(qkv.rotate_and_store, pointers, numbers, constants)


@pytest.mark.parametrize(
    ("dtype", "kept", "splits", "relative"), crossed(CACHES, [(1, True), (4, False)])
)
def test_attention(dtype, kept, splits, relative):
    pointers = dict.fromkeys(("query", "out"), dtype) | dict.fromkeys(("keys", "values"), kept)
    pointers |= dict.fromkeys(("starts", "lengths", "positions"), "i64")
    others = ("slopes", "sinks", "bias", "partial", "weights", "cosines", "sines")
    pointers |= dict.fromkeys(others, "fp32")
    shape = {"HEADS": 8, "SIZE": 48, "BLOCK": 64, "SPLITS": splits}
    constants = shape | {
        "GROUP": 4,
        "ALIBI": splits > 1,
        "SINKS": splits > 1,
        "RELATIVE": relative,
        "TILE": 16,
        "PTX": True,
    }
    constants |= {"SPLIT_BLOCK": splits, "USE_PDL": True, "FRESH": not relative}
    constants |= {"SOFTCAP": 50.0 if relative else 0.0}
    constants |= {"STORE": splits > 1 and not relative, "HALF": 16, "PARTS": splits}
    constants |= {"NORM": splits % 2, "STATE": 768, "STATE_PARTS": 96}
    pointers["row_stats"] = "fp32"
    numbers = {"pool_tokens": "i32", "scale": "fp32", "reach": "i32"}
    pointers |= {"arrivals": "i32", "table": "i32"}
    constants["BLOCK_TOKENS"] = 16 * splits
    assert compile_kernel(decode_attention.attend, pointers, numbers, constants, num_warps=1)
    if dtype != "fp32":  # which gets no matrix products
        constants |= {"TILE": 64, "MEMBERS": 16, "PRECISION": "tf32", "PREFETCH": 64}
        kernel = attention_tile.attend_grouped
        ptx = compile_kernel(kernel, pointers, numbers, constants)
        assert "prefetch.global.L2" in ptx.rpartition("griddepcontrol.wait")[0]


@pytest.mark.parametrize(
    ("dtype", "kept", "relative", "size"), crossed(CACHES, [(False, 48), (True, 256)])
)
def test_attention_of_prompts(dtype, kept, relative, size):
    pointers = dict.fromkeys(("query", "out"), dtype) | dict.fromkeys(("keys", "values"), kept)
    pointers |= {"tiles": "i64", "table": "i32"}
    pointers |= dict.fromkeys(("slopes", "sinks", "bias"), "fp32")
    constants = {"HEADS": 8, "GROUP": 4, "SIZE": size, "BLOCK_TOKENS": 16 if relative else 64}
    constants |= {"ALIBI": not relative, "SINKS": not relative}
    exact, wide = dtype == "fp32", size > prompt_attention.WIDE_HEAD
    constants |= {"TILE": (16 if wide else 32) if exact else 64}
    constants |= {"BLOCK": triton.next_power_of_2(size)}
    constants |= {"RELATIVE": relative, "QUERIES": 64}
    constants |= {"WINDOW": 100 if relative else 0, "SOFTCAP": 0.0 if relative else 50.0}
    constants |= {"PRECISION": "ieee" if exact else "tf32", "PTX": True}
    numbers = {"pool_tokens": "i32", "scale": "fp32", "reach": "i32"}
    options = {"num_warps": 8 if wide else 4, "num_stages": 1 if exact else 2}
    kernel = prompt_attention.attend_prompts
    ptx = compile_kernel(kernel, pointers, numbers, constants, **options)
    assert ("wgmma" in ptx) != exact


@pytest.mark.parametrize(
    ("dtype", "size", "tokens", "parts"),
    [("bf16", 128, 16, 2), ("bf16", 128, 16, 1), ("fp16", 64, 64, 2)],
)
def test_attention_of_pairs_of_heads(dtype, size, tokens, parts):
    """The warps that multiply keep what they have in registers."""
    module = hopper_attention
    element = {"bf16": gl.bfloat16, "fp16": gl.float16}[dtype]
    block = [tokens, module.PANEL]
    layout = gl.NVMMASharedLayout.get_default_for(block, element)
    rows = f"tensordesc<{dtype}{block},{layout!r}>"
    constants = {"HEADS": 32, "GROUP": 4, "SIZE": size, "QUERIES": 64, "PARTS": parts}
    constants |= {"TILE": module.KEYS_PER_TILE, "PIECE": tokens, "PANEL": module.PANEL}
    constants |= {"BLOCK_TOKENS": tokens}
    constants |= {"STAGES": module.STAGES, "REGISTERS": module.CONSUMER_REGISTERS}
    constants |= {"PRODUCER_REGISTERS": module.PRODUCER_REGISTERS}
    signature = {"query": f"*{dtype}", "key_rows": rows, "value_rows": rows, "tiles": "*i64"}
    signature["table"] = "*i32"
    signature |= {"out": f"*{dtype}", "pool_tokens": "i32", "scale": "fp32"}
    signature |= dict.fromkeys(constants, "constexpr")
    kernel = module.attend_group
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, {name: signature[name] for name in kernel.arg_names}, places)
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": 4})
    ptx = compiled.asm["ptx"]
    assert "wgmma" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert f"setmaxnreg.inc.sync.aligned.u32 {module.CONSUMER_REGISTERS}" in ptx.replace("\t", "")
    assert compiled.metadata.shared <= 227 * 1024


@pytest.mark.parametrize(("dtype", "relative"), crossed(TYPES, FLAGS))
def test_attend_spans(dtype, relative):
    pointers = dict.fromkeys(("qkv", "out"), dtype) | {"blocks": "i64", "bias": "fp32"}
    numbers = {"scale": "fp32", "reach": "i32"}
    constants = {"HEADS": 8, "SIZE": 48, "BLOCK": 64, "RELATIVE": relative, "USE_PDL": True}
    constants |= {"QUERIES": 64, "KEYS": 32}
    assert compile_kernel(prompt_attention.attend_blocks, pointers, numbers, constants)


@pytest.mark.parametrize("dtype", TYPES)
def test_multiply_gate(dtype):
    pointers = {"up": dtype, "gate": dtype}
    constants = {"ACTIVATION": 1, "USE_PDL": True, "BLOCK": 2048}
    assert compile_kernel(elementwise.multiply_gate, pointers, {"size": "i32"}, constants)


@pytest.mark.parametrize(("dtype", "kind"), crossed(TYPES, (0, 1, 2)))
def test_shrink(dtype, kind):
    """The row's adapter and its A are read before the kernel before has ended."""
    pointers = dict.fromkeys(("x", "down"), dtype) | {"adapters": "i64"}
    pointers |= dict.fromkeys(("row_stats", "gain", "bias", "inner"), "fp32")
    constants = {"IN": 14336, "RANKS": 60, "NORM": kind, "PARTS": 3, "SPREAD": 4}
    constants |= {"BLOCK_R": 1, "BLOCK": 16384, "USE_PDL": True}
    ptx = compile_kernel(lora.shrink, pointers, {}, constants, num_warps=8)
    before = ptx.partition("griddepcontrol.wait")[0]
    assert before.count("ld.global") == 1 + 16384 // 256  # of a thread
    assert "st.local" not in ptx


@pytest.mark.parametrize(
    ("dtype", "held", "blocks"),
    crossed(
        [("bf16", "bf16"), ("fp32", "fp32"), ("bf16", "i8")],
        [((515, 8, 515, 515),), ((1030, 64, 515, 1030),), ((768, 20, 512, 640),)],
    ),
)
def test_gemv_with_lora(dtype, held, blocks):
    """The row's adapter and its B are read before the kernel before has ended."""
    gated = blocks[0] == 1030
    pointers = dict.fromkeys(("x", "rounded", "lora_up"), dtype) | {"adapters": "i64"}
    pointers |= dict.fromkeys(("weight", "gate_weight"), held)
    constants = {
        "OUT": 515 if gated else blocks[0],
        "IN": 768,
        "NORM": 1,
        "OFFSET": True,
        "ACTIVATION": 4,
        "GATED": gated,
        "RESIDUAL": False,
        "ROUNDED": False,
        "PRESCALED": 0,
        "LORA": blocks,
        **TILE,
    }
    numbers = {"part_eps": "fp32"}
    known = {*pointers, *numbers, *constants}
    pointers |= {name: "fp32" for name in gemv.gemv.arg_names if name not in known}
    ptx = compile_kernel(gemv.gemv, pointers, numbers, constants)
    assert "ld.global.b64" in ptx.partition("griddepcontrol.wait")[0]


@pytest.mark.parametrize(("batch", "rank"), [(16, 8), (32, 16), (64, 64)])
def test_dot_rows_with_lora(batch, rank):
    """With a gate, and with three blocks; as whole tiles of outputs and otherwise."""
    for gated, out, splits in ((True, 512, 1), (False, 768, 2), (False, 515, 4)):
        pointers = dict.fromkeys(("x", "weight", "gate_weight", "lora_up"), "bf16")
        pointers |= {"adapters": "i64", "places": "i32"}
        constants = {
            "OUT": out,
            "IN": 768,
            "OFFSET": False,
            "ACTIVATION": 4 if gated else 0,
            "GATED": gated,
            "LARGEST": False,
            "SPLITS": splits,
            "PREFETCH": 0,
            "LORA": (1024, rank, 512, 1024) if gated else (out, rank, 384, 448),
            "USE_PDL": True,
            "ROWS": 64,
            "BLOCK": 128,
            "BATCH": batch,
        }
        known = {*pointers, "count", *constants}
        pointers |= {name: "fp32" for name in dot.dot_rows.arg_names if name not in known}
        ptx = compile_kernel(dot.dot_rows, pointers, {"count": "i32"}, constants)
        assert "prefetch.global.L2" in ptx.partition("griddepcontrol.wait")[0]
        assert "st.local" not in ptx


DELTA_POINTERS = {
    "delta_chunks": ("mixed", "betas", "decays", "news", "erased"),
    "delta_states": ("mixed", "decays", "news", "erased", "states", "before", "after"),
    "delta_outputs": ("mixed", "decays", "news", "states", "out"),
}


@pytest.mark.parametrize("kernel", DELTA_POINTERS)
@pytest.mark.parametrize("of_keys", [pytest.param(False, marks=pytest.mark.slow), True])
def test_scans_of_delta_nets(kernel, of_keys):
    exact = ("betas", "decays", "before", "after")
    pointers = {name: "fp32" if name in exact else "bf16" for name in DELTA_POINTERS[kernel]}
    names = ("tokens", "chunks") if kernel == "delta_states" else ("tokens",)
    constants = {
        "HEADS": 32,
        "KEY_HEADS": 32,
        "KEYS": 128,
        "VALUES": 128,
        "CHUNK": delta_scans.KEY_CHUNK if of_keys else delta_scans.DELTA_CHUNK,
        "BLOCK_K": 128,
        "BLOCK_V": 32 if kernel == "delta_states" else 128,
        "OF_KEYS": of_keys,
        "PRECISION": "tf32",
    }
    numbers = dict.fromkeys(names, "i32")
    assert compile_kernel(getattr(delta_scans, kernel), pointers, numbers, constants, num_warps=4)
