"""One row's folded norm is as near to float64 as several rows' norms are; see kernel_checks.py."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

from benchmarks.norm_errors import (  # noqa: E402
    CHANNELS,
    MADE,
    MOVED,
    NORMS,
    READ,
    STATES,
    WEIGHTS,
    Bench,
)
from launcher_scripts.kernels import reference  # noqa: E402
from launcher_scripts.kernels.cuda import fused, peer_buffers  # noqa: E402
from launcher_scripts.kernels.operands import Hidden, Linear  # noqa: E402
from tests.kernels import kernel_checks  # noqa: E402
from tests.kernels.kernel_checks import DEVICE, INTERPRETED, make_peer_buffers  # noqa: E402

pytestmark = [kernel_checks.pytestmark, pytest.mark.parametrize("norm", NORMS)]
# The interpreter is slow, rounds bfloat16 towards zero, and errors of few numbers scatter.
SIZES = (64, 48) if INTERPRETED else (2048, 1024)
MOST = 2.5 if INTERPRETED else 1.5  # times several rows' error
MOST_ALONE = 4.0  # of a single number
SEEDS = 1 if INTERPRETED else 16
TYPES = ("fp16", "int8 fp16") if INTERPRETED else WEIGHTS
SOME = TYPES[:1] if INTERPRETED else WEIGHTS
FAR = (STATES[-1], CHANNELS[-1]) if INTERPRETED else STATES + CHANNELS


class ThroughPeerBuffers(Bench):
    """Sums are those of two ranks, one of which has nothing to add."""

    def accumulate(self, x: torch.Tensor, last: Linear, onto: Hidden, norm) -> Hidden:
        buffers = make_peer_buffers(2, self.size)
        for buffer, part in zip(buffers, (x, torch.zeros_like(x)), strict=True):
            peer_buffers.send_product(part, last, buffer)
        return peer_buffers.receive_sum(None, onto, norm, buffers[0])


def error(
    kind: type[Bench], rows: int, norm: str, weights: str, case: tuple[str, str, str]
) -> float:
    """Of the interpreter's several rows, what they come to in plain torch."""
    kernels, (made, read, state) = fused, case
    if INTERPRETED and rows > 1:  # the reference's own sums are float16
        kernels, weights, made = reference, weights.split()[-1], "hidden"
        state = "mean 0" if case[0] == "goes" else state
    bench = kind(kernels, DEVICE, *SIZES, norm, weights)
    return bench.error(made, read, state, rows, SEEDS)


def assert_alike(norm: str, weights: str, cases, kind: type[Bench] = Bench) -> None:
    wrong = []
    for case in cases:
        one = error(kind, 1, norm, weights, case)
        several = error(Bench, 2, norm, weights, case)
        if not one <= several * (MOST_ALONE if case[1] == "head" else MOST):
            wrong.append(f"{' '.join(case)}: one row {one:.1e}, several {several:.1e}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("weights", TYPES)
def test_hidden_states_far_from_zero(made, norm, weights):
    assert_alike(norm, weights, [(made, "project", state) for state in FAR])


@pytest.mark.parametrize("made", MOVED)
@pytest.mark.parametrize("weights", SOME)
def test_a_large_channel_that_moves(made, norm, weights):
    states = CHANNELS[-1:] if INTERPRETED else CHANNELS
    assert_alike(norm, weights, [(made, "project", state) for state in states])


@pytest.mark.parametrize("read", READ[1:])
@pytest.mark.parametrize("weights", SOME)
def test_every_projection(read, norm, weights):
    assert_alike(norm, weights, [("after", read, state) for state in FAR])


@pytest.mark.parametrize("weights", SOME)
def test_sums_through_peer_buffers(norm, weights):
    cases = [("after", "project", state) for state in FAR]
    cases += [(made, "project", CHANNELS[-1]) for made in MOVED]
    assert_alike(norm, weights, cases, ThroughPeerBuffers)
