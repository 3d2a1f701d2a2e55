"""States of rows: scans in chunks and single steps are the plain formulas, token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from launcher_scripts.kernels import reference_recurrence as reference

TOKENS = 150  # two chunks and a part of one
CLOSE = {"rtol": 2e-4, "atol": 2e-4}


def plain_conv(x: Tensor, weight: Tensor, bias: Tensor, tail: Tensor) -> Tensor:
    """Each channel's last inputs times its taps, the oldest first."""
    inputs, taps = torch.cat([tail, x]), weight.shape[1]
    rows = []
    for token in range(len(x)):
        window = inputs[token : token + taps]
        rows.append((window * weight.t()).sum(0) + bias)
    return torch.stack(rows)


def plain_mamba2(
    x: Tensor, steps: Tensor, rates: Tensor, b: Tensor, c: Tensor, skip: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Head by head: S = exp(rate d) S + d x B^T, y = S C + D x."""
    tokens, heads, _ = x.shape
    state, out = state.clone(), torch.zeros_like(x)
    for token in range(tokens):
        for head in range(heads):
            group = head // (heads // b.shape[1])
            step = steps[token, head]
            state[head] = torch.exp(rates[head] * step) * state[head] + step * torch.outer(
                x[token, head], b[token, group]
            )
            out[token, head] = state[head] @ c[token, group] + skip[head] * x[token, head]
    return out, state


def plain_delta(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Head by head: S = a S; S = S + k (beta (v - S^T k))^T; o = S^T q."""
    tokens, heads, _ = value.shape
    state, out = state.clone(), torch.zeros_like(value)
    for token in range(tokens):
        for head in range(heads):
            k = key[token, head // (heads // key.shape[1])]
            q = query[token, head // (heads // key.shape[1])]
            own = torch.exp(decay[token, head]) * state[head]
            new = beta[token, head] * (value[token, head] - own.t() @ k)
            state[head] = own + torch.outer(k, new)
            out[token, head] = state[head].t() @ q
    return out, state


def mamba2_operands(tokens: int) -> tuple[Tensor, ...]:
    heads, groups, size, columns = 4, 2, 6, 5
    return (
        torch.randn(tokens, heads, size),
        torch.rand(tokens, heads) + 0.01,
        -torch.rand(heads) - 0.1,
        torch.randn(tokens, groups, columns),
        torch.randn(tokens, groups, columns),
        torch.randn(heads),
        torch.randn(heads, size, columns),
    )


def delta_operands(tokens: int) -> tuple[Tensor, ...]:
    heads, keys, key_size, size = 4, 2, 6, 5
    query, key = (
        torch.nn.functional.normalize(torch.randn(tokens, keys, key_size), dim=-1) for _ in "qk"
    )
    return (
        query,
        key,
        torch.randn(tokens, heads, size),
        -torch.rand(tokens, heads),
        torch.rand(tokens, heads),
        torch.randn(heads, key_size, size),
    )


KINDS = {
    "mamba2": (mamba2_operands, plain_mamba2, reference.mamba2_scan, reference.mamba2_step),
    "delta": (delta_operands, plain_delta, reference.delta_scan, reference.delta_step),
}
OF_TOKENS = {"mamba2": (0, 1, 3, 4), "delta": (0, 1, 2, 3, 4)}


def some(kind: str, operands: tuple[Tensor, ...], rows: slice) -> tuple[Tensor, ...]:
    """The operands of some of the tokens, without the state."""
    return tuple(
        each[rows] if place in OF_TOKENS[kind] else each for place, each in enumerate(operands[:-1])
    )


@pytest.mark.parametrize("kind", KINDS)
def test_scans_and_steps_are_the_formula(kind: str) -> None:
    torch.manual_seed(1)
    make, plain, scan, step = KINDS[kind]
    operands = make(TOKENS)
    expected, last = plain(*operands)
    got, state = scan(*operands)
    torch.testing.assert_close(got, expected, **CLOSE)
    torch.testing.assert_close(state, last, **CLOSE)
    states, outputs = operands[-1][None], []
    for token in range(TOKENS):
        y, states = step(*some(kind, operands, slice(token, token + 1)), states)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs), expected, **CLOSE)
    torch.testing.assert_close(states[0], last, **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 1, 63, 64, 100, TOKENS])
def test_tokens_behind_the_count_change_no_state(kind: str, count: int) -> None:
    torch.manual_seed(2)
    make, _, scan, _ = KINDS[kind]
    operands = make(TOKENS)
    expected = operands[-1]
    if count:
        _, expected = scan(*some(kind, operands, slice(count)), operands[-1])
    _, state = scan(*operands, torch.tensor(count))
    torch.testing.assert_close(state, expected, **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_two_thousand_steps_do_not_drift(kind: str) -> None:
    torch.manual_seed(3)
    make, _, scan, step = KINDS[kind]
    operands = make(2000)
    expected, last = scan(*operands)
    states = operands[-1][None]
    for token in range(2000):
        y, states = step(*some(kind, operands, slice(token, token + 1)), states)
    torch.testing.assert_close(y, expected[-1:], **CLOSE)
    torch.testing.assert_close(states[0], last, **CLOSE)


@pytest.mark.parametrize("taps", [2, 4])
def test_convolutions_begin_with_the_inputs_before(taps: int) -> None:
    torch.manual_seed(4)
    x, weight, bias = torch.randn(20, 6), torch.randn(6, taps), torch.randn(6)
    tail = torch.randn(taps - 1, 6)
    expected = plain_conv(x, weight, bias, tail)
    got, after = reference.conv_scan(x, weight, bias, tail)
    torch.testing.assert_close(got, expected)
    assert torch.equal(after, x[len(x) - taps + 1 :])
    for count in (0, 1, 7):
        _, after = reference.conv_scan(x, weight, bias, tail, torch.tensor(count))
        assert torch.equal(after, torch.cat([tail, x])[count : count + taps - 1])
    tails = tail[None]
    for token in range(len(x)):
        y, tails = reference.conv_step(x[token : token + 1], weight, bias, tails)
        torch.testing.assert_close(y, expected[token : token + 1])
