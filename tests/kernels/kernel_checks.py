"""Fused equals reference: under the interpreter for test_fused.py, on the device for tests/gpu."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")

from launcher_scripts.common.parallelism import Parallelism  # noqa: E402
from launcher_scripts.engine.distributed.communicator import Communicator  # noqa: E402
from launcher_scripts.engine.model.rotary import alibi_slopes  # noqa: E402
from launcher_scripts.kernels import reference  # noqa: E402
from launcher_scripts.kernels.cuda import (  # noqa: E402
    decode_attention,
    dot,
    fused,
    peer_buffers,
    peer_rows,
)
from launcher_scripts.kernels.cuda.compiling import DotTile  # noqa: E402
from launcher_scripts.kernels.operands import (  # noqa: E402
    TABLE_PADDING,
    AttentionScores,
    BlockTable,
    EmbeddingTables,
    HeadNorms,
    Heads,
    Hidden,
    LayerCache,
    Linear,
    Norm,
    PeerBuffers,
    RelativeBias,
    RowColumns,
    Spans,
    StepRows,
)
from launcher_scripts.kernels.quantization import FP8  # noqa: E402
from launcher_scripts.kernels.reference_attention import span_blocks  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
SIZES = ((48, 40), (33, 21), (1030, 3)) if INTERPRETED else ((768, 2304), (1000, 515), (6144, 700))
# The reference rounds, too: in float16 it is up to 2.3e-3 from float32 itself.
# Numbers that differ in their last bits may be neighbours in e4m3.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 1.6e-2, FP8: 5e-2}
# A norm is folded into a product behind its last piece, however many pieces there are.
NORMS_AND_SIZES = list(zip(("layernorm", None, "rmsnorm"), SIZES, strict=True))
COMPUTE_TYPES = [torch.float32, torch.float16, torch.bfloat16]
# The interpreter cannot multiply matrices of bfloat16.
DOT_TYPES = [torch.float32, torch.float16 if INTERPRETED else torch.bfloat16]
# Compute types, and those of the cache.
CACHES = [(dtype, kept) for dtype in DOT_TYPES for kept in (dtype, FP8)]

pytestmark = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="neither interpreter nor CUDA device"
)


SPLITS = decode_attention._splits


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(7)


@pytest.fixture(autouse=True)
def few_splits(monkeypatch):
    """The interpreter is slow: four programs share a context that is not short, not 32."""
    if INTERPRETED:
        monkeypatch.setattr(decode_attention, "_splits", lambda *_: 4)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def make_norm(kind: str, size: int) -> Norm:
    bias = random(size) if kind == "layernorm" else None
    return Norm(kind, 1 + 0.3 * random(size), bias, 1e-5)


def make_linear(out: int, size: int, norm: Norm | None, bias: bool, dtype: torch.dtype) -> Linear:
    return Linear(
        (random(out, size) / math.sqrt(size)).to(dtype),
        random(out, dtype=dtype) if bias else None,
        norm,
    )


def assert_close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    error = (got.float() - want.float()).norm() / want.float().norm()
    assert error <= TOLERANCE[dtype], f"relative error {error:.2e}"


def coarser(dtype: torch.dtype, kept: torch.dtype) -> torch.dtype:
    """Which of the compute type and the cache's decides how near results are."""
    return dtype if dtype == torch.float32 else kept


def assert_alike(got: LayerCache, want: LayerCache, written: list[int], dtype: torch.dtype) -> None:
    """The same tokens are written, with nearly the same numbers."""
    for mine, theirs in zip(parts(got), parts(want), strict=True):
        assert mine.dtype == theirs.dtype
        mine, theirs = mine.float(), theirs.float()
        assert_close(mine[:, written], theirs[:, written], dtype)
        assert mine.isnan().any(-1).tolist() == theirs.isnan().any(-1).tolist()


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norm(kind):
    x = 3 + random(3, SIZES[1][0])
    norm = make_norm(kind, x.shape[1])
    assert_close(
        fused.norm(x, norm, torch.float32), reference.norm(x, norm, torch.float32), torch.float32
    )


@pytest.mark.parametrize(("kind", "size"), NORMS_AND_SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2])
def test_project(rows, kind, dtype, size):
    norm = None if kind is None else make_norm(kind, size[0])
    linear = make_linear(size[1], size[0], norm, kind != "rmsnorm", dtype)
    x = 0.5 + random(rows, size[0])
    assert_close(fused.project(x, linear), reference.project(x, linear), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3])
def test_project_add(rows, dtype):
    size = SIZES[0]
    linear = make_linear(size[1], size[0], None, True, dtype)
    x, residual = random(rows, size[0], dtype=dtype), random(rows, size[1])
    assert_close(
        fused.project_add(x, linear, residual), reference.project_add(x, linear, residual), dtype
    )


@pytest.mark.parametrize("activation", sorted(reference.ACTIVATIONS))
@pytest.mark.parametrize("gated", [False, True])
def test_mlp_up(gated, activation):
    size = SIZES[1]
    norm = make_norm("layernorm", size[0])
    up = make_linear(size[1], size[0], norm, True, torch.float32)
    gate = make_linear(size[1], size[0], norm, True, torch.float32) if gated else None
    x = random(1, size[0])
    assert_close(
        fused.mlp_up(x, up, gate, activation),
        reference.mlp_up(x, up, gate, activation),
        torch.float32,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
def test_logits_are_float32(rows, bias, dtype):
    head = make_linear(SIZES[0][1], SIZES[0][0], make_norm("rmsnorm", SIZES[0][0]), bias, dtype)
    x = random(rows, SIZES[0][0])
    got = fused.logits(x, head)
    assert got.dtype == torch.float32
    assert_close(got, reference.logits(x, head), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embed_gives_zeros_for_ids_of_other_ranks(dtype):
    table = random(11, 21, dtype=dtype)
    ids = torch.tensor([5, 15, 16, 4, 9], device=DEVICE)
    got, want = fused.embed(ids, table, 5), reference.embed(ids, table, 5)
    assert torch.equal(got, want)
    assert got[[2, 3]].abs().sum() == 0


@pytest.mark.parametrize("vocab", [5, 1024, 2500])
def test_argmax_takes_the_first_of_equal_ones(vocab):
    logits = random(3, vocab + 3)[:, :vocab]
    logits[0, [1, 3]] = 9.0
    logits[1, [vocab - 1]] = 9.0
    got = fused.argmax(logits)
    assert got.dtype == torch.int64
    assert got.tolist() == reference.argmax(logits).tolist()
    assert got[:2].tolist() == [1, vocab - 1]


@pytest.mark.parametrize("count", [1, 300, 310])
def test_tokens_are_copied_to_the_host(count):
    padding, lines = 305, 3
    own, expected = (torch.full((lines, 306), -7, pin_memory=not INTERPRETED) for _ in range(2))
    written, counted = (torch.zeros(1, dtype=torch.int64, device=DEVICE) for _ in range(2))
    for first_slot in (0, padding, 4, 2, 1):
        tokens = torch.randint(2**40, (count, 2), device=DEVICE)[:, 1]
        slots = torch.full((count,), padding, device=DEVICE)
        slots[0] = first_slot
        fused.copy_to_host(tokens, slots, own, written, padding)
        reference.copy_to_host(tokens, slots, expected, counted, padding)
    if not INTERPRETED:
        torch.cuda.synchronize()
    assert written.tolist() == counted.tolist() == [4]
    assert own.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("rotary_size", "norm"), [(0, None), (4, None), (12, None), (4, "rmsnorm"), (12, "layernorm")]
)
@pytest.mark.parametrize("kept", [None, FP8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_store_kv(dtype, kept, rotary_size, norm):
    heads, tokens = Heads(4, 2, 12), 3
    qkv = random(tokens, 8 * 12, dtype=dtype)
    qkv[:, ::5] *= 300  # more than e4m3 holds
    slots = torch.tensor([5, 0, 3], device=DEVICE)
    norms = norm and HeadNorms(make_norm(norm, 12), replace(make_norm(norm, 12), eps=0.5))
    rotary = None
    if rotary_size:
        frequencies = 10.0 ** -torch.arange(rotary_size // 2, device=DEVICE).float()
        rotary = reference.rotary_table(torch.tensor([2, 9, 4], device=DEVICE), frequencies)
    caches = [poisoned_cache(heads, 7, kept or dtype) for _ in range(2)]
    queries = [
        kernels.store_kv(qkv, heads, rotary, slots, cache, norms)
        for kernels, cache in zip((fused, reference), caches, strict=True)
    ]
    assert_close(queries[0], queries[1], dtype)
    assert_alike(*caches, sorted(slots.tolist()), dtype)


@pytest.mark.parametrize(
    ("longest", "alibi"),
    [(70, True), (300, False)] + ([] if INTERPRETED else [(1500, False), (1500, True)]),
)
@pytest.mark.parametrize("kept", [None, FP8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_attention(dtype, kept, longest, alibi):
    heads, tokens = Heads(6, 2, 12), 1600
    kept = kept or dtype
    cache = poisoned_cache(heads, tokens, kept)
    lengths = torch.tensor([1, longest, min(65, longest)], device=DEVICE)
    starts = torch.tensor([1599, 90, 0], device=DEVICE)
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        for part in parts(cache):
            part[:, start : start + length] = random(2, length, 12, dtype=kept)
    query = random(3, 6, 12, dtype=dtype)
    slopes = torch.tensor(alibi_slopes(6), device=DEVICE) if alibi else None
    for sinks in (None, 3 * random(6)):
        scores = AttentionScores(12**-0.5, slopes=slopes, sinks=sinks)
        rows = (starts, lengths, longest, scores)
        want = reference.decode_attention(query, cache, *rows)
        for local in (cache, scattered(cache, 16 if longest == 70 else 64)):
            got = fused.decode_attention(query, local, *rows)
            assert not got.isnan().any()
            assert_close(got, want, dtype)


@pytest.mark.parametrize(("longest", "many"), [(70, 2), (70, 99), (300, 2)])
def test_decode_attention_of_many_heads(longest, many, monkeypatch):
    """The shapes that spare processors for others' programs."""
    monkeypatch.setattr(decode_attention, "_splits", SPLITS)
    monkeypatch.setattr(decode_attention, "FEW_HEADS", 1)
    monkeypatch.setattr(decode_attention, "MAX_HEADS", many)
    heads = Heads(2, 1, 12)
    cache = poisoned_cache(heads, 400, torch.float32)
    lengths = torch.tensor([1, longest], device=DEVICE)
    starts = torch.tensor([399, 0], device=DEVICE)
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        for part in parts(cache):
            part[:, start : start + length] = random(1, length, 12)
    scores = AttentionScores(12**-0.5)
    query, rows = random(2, 2, 12), (starts, lengths, longest, scores)
    got = fused.decode_attention(query, scattered(cache, 64), *rows)
    assert_close(got, reference.decode_attention(query, cache, *rows), torch.float32)


@pytest.mark.parametrize(
    ("dtype", "kept", "longest"),
    [
        (torch.float32, None, 70),
        (torch.float32, FP8, 300),
        (torch.bfloat16, None, 300),
        (torch.bfloat16, FP8, 70),
    ],
)
def test_decode_attention_with_a_relative_bias(dtype, kept, longest):
    """Own tokens, and others' that the row's position lies among, before and behind."""
    heads, tokens = Heads(4, 4, 12), 400
    kept = kept or dtype
    cache = poisoned_cache(heads, tokens, kept)
    lengths = torch.tensor([1, longest, 65], device=DEVICE)
    starts = torch.tensor([399, 90, 0], device=DEVICE)
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        for part in parts(cache):
            part[:, start : start + length] = random(4, length, 12, dtype=kept)
    query = random(3, 4, 12, dtype=dtype)
    scores = AttentionScores(1.0, relative=RelativeBias(random(4, 2 * 9 + 1)))
    positions = torch.tensor([0, 30, 200], device=DEVICE)
    arguments = (query, cache, starts, lengths, longest, scores)
    got = fused.decode_attention(*arguments, positions=positions)
    assert not got.isnan().any()
    assert_close(got, reference.decode_attention(*arguments, positions=positions), dtype)


def hidden_pair(rows: int, linear: Linear) -> tuple[Hidden, Hidden]:
    """The same hidden states in the fused and in the reference form, before the linear."""
    exact = 0.5 + random(rows, linear.in_size)
    dtype = linear.dtype
    return fused.hidden(exact, linear.norm, dtype), reference.hidden(exact, linear.norm, dtype)


def assert_for_norm(got: Hidden, want: Hidden, norm: Norm, dtype: torch.dtype) -> None:
    """Several rows are normalized; one is prescaled, and its sums are known."""
    if got.exact.shape[0] > 1:
        assert_close(got.operand, want.operand, dtype)
        return
    shift, unit = got.row_stats[:2].tolist()
    scaled = (want.exact[0] - shift) * unit
    assert_close(got.operand[0], (scaled * norm.weight).to(dtype), dtype)
    total, squares = got.row_stats[4:].double().view(2, -1).sum(1)
    length = (scaled.double().square() + norm.eps * unit**2).sum().sqrt()
    assert (squares.sqrt() - length).abs() <= TOLERANCE[dtype] * length
    if norm.kind == "layernorm":
        error = (total - scaled.double().sum()).abs()
        assert error <= TOLERANCE[dtype] * length * math.sqrt(len(scaled))


@pytest.mark.parametrize(("kind", "size"), [*NORMS_AND_SIZES, ("layernorm", SIZES[2])])
@pytest.mark.parametrize("dtype", DOT_TYPES)
@pytest.mark.parametrize("rows", [1, 3])
def test_project_hidden(rows, kind, dtype, size):
    norm = None if kind is None else make_norm(kind, size[0])
    linear = make_linear(size[1], size[0], norm, kind != "rmsnorm", dtype)
    mine, theirs = hidden_pair(rows, linear)
    got = fused.project_hidden(mine, fused.prepare(linear))
    assert_close(got, reference.project_hidden(theirs, reference.prepare(linear)), dtype)


@pytest.mark.parametrize(
    ("gated", "kind", "activation"),
    [
        (gated, ("layernorm", "rmsnorm")[(place + gated) % 2], activation)
        for place, activation in enumerate(sorted(reference.ACTIVATIONS))
        for gated in (False, True)
    ],
)
@pytest.mark.parametrize("rows", [1, 2])
def test_expand(rows, kind, gated, activation):
    size = SIZES[1]
    norm = make_norm(kind, size[0])
    up, gate = (make_linear(size[1], size[0], norm, True, torch.float32) for _ in range(2))
    mine, theirs = hidden_pair(rows, up)
    prepared = fused.prepare(gate) if gated else None
    got = fused.expand(mine, fused.prepare(up), prepared, activation)
    want = reference.expand(theirs, up, gate if gated else None, activation)
    assert_close(got, want, torch.float32)


@pytest.mark.parametrize("dtype", DOT_TYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_accumulate(rows, bias, dtype):
    size = SIZES[0]
    linear = make_linear(size[1], size[0], None, bias, dtype)
    norm = make_norm("layernorm", size[1])
    x, exact = random(rows, size[0], dtype=dtype), random(rows, size[1])
    got = fused.accumulate(x, linear, fused.hidden(exact, norm, dtype), norm)
    want = reference.accumulate(x, linear, reference.hidden(exact, norm, dtype), norm)
    assert_close(got.exact, want.exact, dtype)
    assert_for_norm(got, want, norm, dtype)


@pytest.mark.parametrize("dtype", DOT_TYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_sums_over_ranks(rows, bias, dtype):
    size, ranks = SIZES[0], EqualRanks()
    linear = make_linear(size[1], size[0], None, bias, dtype)
    norm = make_norm("rmsnorm", size[1])
    x, exact = random(rows, size[0], dtype=dtype), random(rows, size[1])
    part, same = (side.product_over_ranks(x, linear, ranks) for side in (fused, reference))
    assert part.dtype == (torch.float32 if rows < 70 else dtype)
    assert_close(part.float(), same, dtype)
    onto = fused.hidden(exact, norm, dtype)
    got = fused.accumulate_over_ranks(x, linear, onto, norm, ranks)
    onto = reference.hidden(exact, norm, dtype)
    want = reference.accumulate_over_ranks(x, linear, onto, norm, ranks)
    assert_close(got.exact, want.exact, dtype)
    assert_for_norm(got, want, norm, dtype)


class EqualRanks(Communicator):
    """Two ranks that have the same."""

    def __init__(self):
        super().__init__(Parallelism(2))

    def tp_sum(self, tensor):
        return tensor + tensor


def make_peer_buffers(ranks: int, words: int) -> list[PeerBuffers]:
    """Every rank's, all on one device."""
    own = torch.zeros(ranks, 2, ranks, words, dtype=torch.int64, device=DEVICE)
    addresses = torch.tensor([buffer.data_ptr() for buffer in own], device=DEVICE)
    return [
        PeerBuffers(own[rank], addresses, torch.zeros_like(own[0, 0, 0], dtype=torch.int32), rank)
        for rank in range(ranks)
    ]


@pytest.mark.parametrize(
    ("ranks", "kind", "dtype"),
    [
        (2, "layernorm", torch.float32),
        (3, "rmsnorm", torch.bfloat16),
        (4, None, torch.bfloat16),
    ],
)
def test_sums_through_peer_buffers(ranks, kind, dtype):
    """Exchange after exchange, of rows of two lengths; all ranks find the same to the last bit."""
    words = max(out for _, out in SIZES) + 3
    buffers = make_peer_buffers(ranks, words)
    for turn in range(4):
        size = SIZES[turn % 2]
        norm = None if kind is None else make_norm(kind, size[1])
        whole = make_linear(size[1], ranks * size[0], None, turn != 3, dtype)
        x, exact = random(1, ranks * size[0], dtype=dtype), random(1, size[1])
        mine, theirs = (side.hidden(exact, norm, dtype) for side in (fused, reference))
        for rank, weight in enumerate(whole.weight.chunk(ranks, 1)):
            linear = Linear(weight.contiguous(), whole.bias)
            part = x[:, rank * size[0] : (rank + 1) * size[0]].contiguous()
            assert peer_rows.fits_buffers(1, size[1], buffers[rank])
            peer_buffers.send_product(part, linear, buffers[rank])
        got = [peer_buffers.receive_sum(whole.bias, mine, norm, buffer) for buffer in buffers]
        want = reference.accumulate(x, whole, theirs, norm)
        for found in got:
            assert torch.equal(found.exact, got[0].exact)
            assert_close(found.exact, want.exact, dtype)
            if norm is None:
                assert_close(found.operand, want.operand, dtype)
            else:
                assert_for_norm(found, want, norm, dtype)


@pytest.mark.parametrize(("ranks", "kind"), [(2, "layernorm"), (3, "rmsnorm"), (4, None)])
def test_sums_of_several_rows_through_peer_buffers(ranks, kind):
    """Exchange after exchange of other rows; each share of a lane counts its own, and all ranks
    find the same to the last bit."""
    dtype, buffers = DOT_TYPES[1], make_peer_buffers(ranks, 2048)
    for rows, size, shares in ((3, 70, 6), (2, 600, 20), (4, 512, 32), (1, 1100, 18), (2, 40, 2)):
        norm = None if kind is None else make_norm(kind, size)
        whole = random(ranks, 2, rows, size)
        bias = None if rows == 4 else random(size)
        exact = random(rows, size)
        before = buffers[0].exchanges.clone()
        for parts, buffer in zip(whole, buffers, strict=True):
            assert peer_rows.fits_buffers(rows, size, buffer)
            peer_rows.send_parts(parts, buffer)
        for buffer in buffers:
            peer_rows.send_sums(rows, size, buffer)
        got = [
            fused.add_parts(parts, bias, exact, norm, dtype, buffer)
            for parts, buffer in zip(whole, buffers, strict=True)
        ]
        total = exact + whole.sum((0, 1)) + (0 if bias is None else bias)
        want = reference.hidden(total, norm, dtype)
        for found in got:
            assert torch.equal(found.exact, got[0].exact)
            assert_close(found.exact, want.exact, torch.float32)
            if norm is None:
                assert_close(found.operand, want.operand, dtype)
            else:
                assert_for_norm(found, want, norm, dtype)
        for buffer in buffers:
            counted = (buffer.exchanges - before).tolist()
            assert counted == [2] * shares + [0] * (2048 - shares)


@pytest.mark.parametrize("rank", [0, 2])
def test_the_largest_through_peer_buffers(rank):
    """What the others sent is there already; of equal values the lowest rank's wins."""
    values = random(4, 3, 5)
    values[:, :, 1] = 0.5
    values[:, 0, 2] = -math.inf
    ids = torch.arange(60, device=DEVICE).view(4, 3, 5) * 2**20
    mine = make_peer_buffers(3, 640)[rank]
    for number in range(1, 5):
        now, known = values[number - 1], ids[number - 1]
        for other in {0, 1, 2} - {rank}:
            lane = mine.local[number % 2, other].view(-1, peer_buffers.SHARE)[:5]
            lane[:, 0] = number << 32 | now[other].view(torch.int32).long() & 0xFFFFFFFF
            lane[:, 1] = number << 32 | known[other]
        got = peer_buffers.exchange_largest(now[rank], known[rank], mine)
        assert got.dtype == torch.int64
        assert torch.equal(got, known.gather(0, now.argmax(0, keepdim=True))[0])
    assert mine.exchanges[:6].tolist() == [4] * 5 + [0]


@pytest.mark.parametrize("held", [5, 40, 38])
@pytest.mark.parametrize("dtype", DOT_TYPES)
@pytest.mark.parametrize("rows", [1, 3])
def test_largest(rows, dtype, held):
    head = make_linear(40, SIZES[0][0], make_norm("rmsnorm", SIZES[0][0]), True, dtype)
    head.weight[3] = head.weight[1]
    head.bias[[1, 3]] = 50.0
    mine, theirs = hidden_pair(rows, head)
    got, want = (
        fused.largest(mine, fused.prepare(head), held),
        reference.largest(theirs, head, held),
    )
    assert_close(got[0], want[0], dtype)
    assert got[1].dtype == torch.int64
    assert got[1].tolist() == want[1].tolist() == [1] * rows


@pytest.mark.parametrize(
    ("dtype", "kept", "rotary_size"),
    [(*types, size) for types in CACHES for size in (0, 4, 12) if size == 4 or FP8 not in types],
)
@pytest.mark.parametrize("rows", [1, 3])
def test_project_heads(rows, dtype, kept, rotary_size):
    heads, size = Heads(4, 2, 12), SIZES[1][0]
    linear = make_linear(8 * 12, size, make_norm("layernorm", size), True, dtype)
    positions = torch.tensor([3, 0, 7][:rows], device=DEVICE)
    starts = torch.tensor([2, 9, 10][:rows], device=DEVICE)
    step = StepRows(starts, positions, positions + 1)
    rotary = None
    if rotary_size:
        frequencies = 10.0 ** -torch.arange(rotary_size // 2, device=DEVICE).float()
        rotary = reference.rotary_table(torch.arange(12, device=DEVICE), frequencies)
    mine, theirs = hidden_pair(rows, linear)
    caches = [poisoned_cache(heads, 18, kept) for _ in range(2)]
    got = fused.project_heads(mine, fused.prepare(linear), heads, rotary, step, caches[0])
    want = reference.project_heads(theirs, linear, heads, rotary, step, caches[1])
    assert_close(got, want, dtype)
    assert_alike(*caches, sorted((starts + positions).tolist()), coarser(dtype, kept))


@pytest.fixture
def in_parts(request, monkeypatch):
    """Projections of queries leave that many parts."""
    tile = DotTile(64, 64, 4, 2, request.param, 1)
    monkeypatch.setattr(dot, "dot_tile", lambda *_: tile)


def rows_in_parts(check):
    """One row's projection has no parts."""
    cases = pytest.mark.parametrize(
        ("rows", "in_parts"), [(1, 1), (3, 1), (3, 2)], indirect=["in_parts"]
    )
    return pytest.mark.usefixtures("in_parts")(cases(check))


@rows_in_parts
@pytest.mark.parametrize(("longest", "relative"), [(70, True), (300, False)])
@pytest.mark.parametrize(("dtype", "kept"), CACHES)
def test_attend_source(rows, dtype, kept, longest, relative):
    heads, size = Heads(4, 4, 12), SIZES[1][0]
    linear = make_linear(4 * 12, size, make_norm("rmsnorm", size), True, dtype)
    positions, lengths, starts = (
        torch.tensor(values[:rows], device=DEVICE)
        for values in ([3, 0, 90], [longest, 1, 66], [2, 399, 310])
    )
    step = StepRows(starts + lengths, positions, positions + 1, starts, lengths)
    cache = poisoned_cache(heads, 400, kept)
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        for part in parts(cache):
            part[:, start : start + length] = random(4, length, 12, dtype=kept)
    mine, theirs = hidden_pair(rows, linear)
    bias = RelativeBias(random(4, 2 * 9 + 1)) if relative else None
    more = (heads, step, cache, longest, AttentionScores(1.0, 1.5, relative=bias))
    got = fused.attend_source(mine, fused.prepare(linear), *more)
    want = reference.attend_source(theirs, linear, *more)
    assert not got.isnan().any()
    assert_close(got, want, dtype)


@rows_in_parts
@pytest.mark.parametrize(("longest", "rotary_size"), [(70, 0), (300, 8)])
@pytest.mark.parametrize(("dtype", "kept"), CACHES)
def test_attend_own(rows, dtype, kept, longest, rotary_size):
    """The new token is stored, turned, and attended to; a row may have no other."""
    heads, size = Heads(4, 2, 12), SIZES[1][0]
    linear = make_linear(8 * 12, size, make_norm("layernorm", size), True, dtype)
    positions = torch.tensor([longest - 1, 0, 66][:rows], device=DEVICE)
    starts = torch.tensor([2, 399, 310][:rows], device=DEVICE)
    step = StepRows(starts, positions, positions + 1)
    rotary = None
    if rotary_size:
        frequencies = 10.0 ** -torch.arange(rotary_size // 2, device=DEVICE).float()
        rotary = reference.rotary_table(torch.arange(400, device=DEVICE), frequencies)
    mine, theirs = hidden_pair(rows, linear)
    caches = equal_caches(heads, 400, starts, positions, kept)
    more, prepared = (heads, rotary, step), fused.prepare(linear)
    scores = AttentionScores(12**-0.5, sinks=3 * random(4) if rotary_size else None)
    got = fused.attend_own(mine, prepared, *more, caches[0], longest, scores)
    want = reference.attend_own(theirs, linear, *more, caches[1], longest, scores)
    assert_close(got, want, coarser(dtype, kept))
    assert_alike(*caches, (starts + positions).tolist(), coarser(dtype, kept))


def test_attend_own_in_sequence():
    """Tokens of one sequence in one step, the last one first, attend to one another."""
    heads, size, dtype = Heads(4, 2, 12), SIZES[1][0], torch.float32
    linear = make_linear(8 * 12, size, make_norm("layernorm", size), True, dtype)
    positions = torch.tensor([6, 5, 4], device=DEVICE)
    starts = torch.full_like(positions, 3)
    step = StepRows(starts, positions, positions + 1, in_sequence=True)
    mine, theirs = hidden_pair(3, linear)
    caches = equal_caches(heads, 40, starts, positions, dtype)
    more, scores = (heads, None, step), AttentionScores(12**-0.5)
    got = fused.attend_own(mine, fused.prepare(linear), *more, caches[0], 40, scores)
    want = reference.attend_own(theirs, linear, *more, caches[1], 40, scores)
    assert_close(got, want, dtype)


@pytest.mark.parametrize("rows", [1, 3])
def test_choose_keeps_the_tokens(rows):
    head = make_linear(40, SIZES[0][0], make_norm("rmsnorm", SIZES[0][0]), False, torch.float32)
    mine, theirs = hidden_pair(rows, head)
    slots = torch.tensor([2, 0, 3][:rows], device=DEVICE)
    kept = []
    for kernels, x in ((fused, mine), (reference, theirs)):
        columns = RowColumns(*torch.full((5, 4), -1, device=DEVICE))
        tokens = kernels.choose(x, kernels.prepare(head), 38, columns, slots)
        assert columns.token[slots].tolist() == tokens.tolist()
        kept.append(columns.token)
    assert torch.equal(*kept)


@pytest.mark.parametrize("sources", [False, True])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("slots", [[2], [2, 0, 4, 4]])
def test_begin_step(slots, learned, sources):
    """Rows grow, ids go to the history; padding rows stay as they are."""
    tables = EmbeddingTables(
        random(11, 21, dtype=torch.bfloat16), 5, random(9, 21) if learned else None
    )
    norm = make_norm("layernorm", 21)
    found = []
    for kernels in (fused, reference):
        columns = RowColumns(
            *(
                torch.tensor(values, device=DEVICE)
                for values in (
                    [6, 9, 15, 7, -1],
                    [4, 0, 9, 0, 19],
                    [3, 0, 5, 2, 0],
                    [2, 0, 7, 1, 0],
                    [2, 0, 0, 1, 0],
                )
            )
        )
        history = torch.full((20,), -1, device=DEVICE)
        hidden, rows = kernels.begin_step(
            torch.tensor(slots, device=DEVICE), columns, history, tables, norm, sources=sources
        )
        found.append((hidden, rows, columns.length, history))
    (got, rows, lengths, history), (want, same_rows, same_lengths, same_history) = found
    assert torch.equal(got.exact, want.exact)
    assert_for_norm(got, want, norm, torch.bfloat16)
    assert torch.equal(lengths, same_lengths)
    assert torch.equal(history, same_history)
    for name in ("starts", "positions", "lengths", "source_starts", "source_lengths"):
        mine, theirs = getattr(rows, name), getattr(same_rows, name)
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("longest", "alibi", "fresh"),
    [(70, False, True), (70, True, False), (300, False, False), (300, True, True)],
)
def test_decode_attention_in_a_step(longest, alibi, fresh):
    """Counts of arrivals are left at zero, so that they serve the next layer."""
    heads, tokens = Heads(6, 2, 12), 1600
    cache = poisoned_cache(heads, tokens, torch.float32)
    cache = LayerCache(*parts(cache), torch.zeros(18, dtype=torch.int32, device=DEVICE))
    lengths = torch.tensor([1, longest, min(65, longest)], device=DEVICE)
    starts = torch.tensor([1599, 90, 0], device=DEVICE)
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        for part in parts(cache):
            part[:, start : start + length] = random(2, length, 12)
    slopes = torch.tensor(alibi_slopes(6), device=DEVICE) if alibi else None
    scores = AttentionScores(12**-0.5, slopes=slopes)
    for _ in range(2):
        arguments = (random(3, 6, 12), cache, starts, lengths, longest, scores)
        got = fused.decode_attention(*arguments, fresh=fresh)
        assert_close(got, reference.decode_attention(*arguments), torch.float32)
        assert not cache.arrivals.any()


@pytest.mark.parametrize(("size", "relative"), [(12, False), (64, True)])
@pytest.mark.parametrize("dtype", DOT_TYPES)
def test_attend_spans(dtype, size, relative):
    """Rows of one token and of several blocks; lines without tokens are passed over."""
    heads, counts = Heads(3, 3, size), (5, 1, 64, 64, 130)
    blocks = torch.tensor([*span_blocks(counts), (7, 0, 0)], device=DEVICE)
    qkv = random(sum(counts), 9 * size, dtype=dtype)
    bias = RelativeBias(random(3, 2 * 9 + 1)) if relative else None
    arguments = (qkv, heads, Spans(blocks), AttentionScores(0.3, relative=bias))
    got = fused.attend_spans(*arguments)
    want = reference.attend_spans(*arguments)
    assert not got.isnan().any()
    assert_close(got, want, dtype)


def test_store_kv_without_queries():
    heads = Heads(0, 2, 12)
    key_value, slots = random(3, 4 * 12), torch.tensor([5, 0, 3], device=DEVICE)
    caches = [poisoned_cache(heads, 7, torch.float32) for _ in range(2)]
    for kernels, cache in zip((fused, reference), caches, strict=True):
        assert kernels.store_kv(key_value, heads, None, slots, cache).shape == (3, 0, 12)
    for got, want in zip(parts(caches[0]), parts(caches[1]), strict=True):
        assert torch.equal(got[:, slots], want[:, slots])


def poisoned_cache(heads: Heads, tokens: int, dtype: torch.dtype) -> LayerCache:
    shape = (heads.num_kv_heads, tokens, heads.head_size)
    return LayerCache(
        *(torch.full(shape, float("nan"), dtype=dtype, device=DEVICE) for _ in range(2))
    )


def scattered(cache: LayerCache, size: int) -> LayerCache:
    """The same tokens in blocks of `size`, in any order; the addresses are the tokens before."""
    tokens = cache.keys.shape[1]
    table = random_table(-(-tokens // size), size)
    order = table.entries[: -(-tokens // size)].tolist()
    pools = []
    for part in parts(cache):
        shape = (part.shape[0], size * len(order), part.shape[2])
        pool = torch.full(shape, float("nan"), dtype=part.dtype, device=DEVICE)
        for block, number in enumerate(order):
            run = part[:, block * size : (block + 1) * size]
            pool[:, number * size : number * size + run.shape[1]] = run
        pools.append(pool)
    return replace(cache, keys=pools[0], values=pools[1], table=table)


def random_table(blocks: int, size: int) -> BlockTable:
    """Blocks of `size` tokens in any order."""
    entries = torch.zeros(blocks + TABLE_PADDING, dtype=torch.int32, device=DEVICE)
    entries[:blocks] = torch.randperm(blocks, device=DEVICE)
    return BlockTable(entries, size)


def parts(cache: LayerCache) -> tuple[torch.Tensor, torch.Tensor]:
    return cache.keys, cache.values


def equal_caches(
    heads: Heads, tokens: int, starts: torch.Tensor, lengths: torch.Tensor, dtype: torch.dtype
) -> list[LayerCache]:
    """Two caches with the same random keys and values of the rows, [B] each; the rest poisoned."""
    caches = [poisoned_cache(heads, tokens, dtype) for _ in range(2)]
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        shape = (heads.num_kv_heads, length, heads.head_size)
        filled = [random(*shape, dtype=dtype) for _ in range(2)]
        for cache in caches:
            for part, values in zip(parts(cache), filled, strict=True):
                part[:, start : start + length] = values
    return caches
