"""A projection back into the residual whose parts GPUs write into each other's memory."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from launcher_scripts.kernels.cuda.compiling import launcher
from launcher_scripts.kernels.cuda.peer_buffers import (
    add_from_inbox,
    exchange_best,
    gemv_to_inboxes,
)
from launcher_scripts.kernels.cuda.row_products import early, empty_stats, norm_code, part_eps
from launcher_scripts.kernels.cuda.tiles import row_tile
from launcher_scripts.kernels.operands import Hidden, Inboxes, Linear, Norm

SHARE = 64  # values that share a count of exchanges


def fits(x: Tensor, linear: Linear, inboxes: Inboxes) -> bool:
    """Whether linear(x) goes through the inboxes: one row, which they can hold."""
    return x.shape[0] == 1 and linear.weight.shape[0] <= inboxes.lane_words


def send_product(x: Tensor, linear: Linear, inboxes: Inboxes) -> None:
    """linear(x) [1, out] without its bias, to every rank's inbox."""
    out_size, in_size = linear.weight.shape
    tile = row_tile("add", out_size, in_size, linear.in_bytes)
    launcher(gemv_to_inboxes, (triton.cdiv(out_size, tile.rows),))(
        x,
        linear.weight,
        x if linear.scale is None else linear.scale,
        inboxes.addresses,
        inboxes.exchanges,
        inboxes.rank,
        inboxes.lane_words,
        OUT=out_size,
        IN=in_size,
        RANKS=inboxes.ranks,
        SHARE=SHARE,
        ROLLED=tile.rolled,
        ROWS=tile.rows,
        BLOCK=tile.block,
        num_warps=tile.warps,
        num_stages=1,
        **early(x),
    )


def receive_sum(
    bias: Tensor | None, onto: Hidden, norm_of_next: Norm | None, inboxes: Inboxes
) -> Hidden:
    """Hidden states [1, hidden] plus what all ranks sent and a bias, for the next projection."""
    size = onto.exact.shape[1]
    programs = triton.cdiv(size, SHARE)
    exact, operand = torch.empty_like(onto.exact), torch.empty_like(onto.operand)
    row_stats = None if norm_of_next is None else empty_stats(programs, exact.device)
    launcher(add_from_inbox, (programs,))(
        inboxes.own,
        inboxes.exchanges,
        exact if bias is None else bias,
        onto.exact,
        exact if norm_of_next is None else onto.row_stats,
        exact if norm_of_next is None else norm_of_next.weight,
        exact,
        operand,
        exact if row_stats is None else row_stats,
        part_eps(norm_of_next, size, programs),
        inboxes.lane_words,
        SIZE=size,
        RANKS=inboxes.ranks,
        LANES=triton.next_power_of_2(inboxes.ranks),
        SHARE=SHARE,
        OFFSET=bias is not None,
        PRESCALED=norm_code(norm_of_next),
        num_warps=1,
        **early(exact),
    )
    return Hidden(exact, operand, row_stats)


def most_rows(inboxes: Inboxes) -> int:
    """How many rows can exchange a few words each."""
    return inboxes.lane_words // SHARE


def exchange_largest(values: Tensor, ids: Tensor, inboxes: Inboxes) -> Tensor:
    """reference.largest_of_ranks for up to most_rows rows; every rank calls it."""
    tokens = torch.empty_like(ids)
    launcher(exchange_best, (values.shape[0],))(
        values,
        ids,
        tokens,
        inboxes.own,
        inboxes.addresses,
        inboxes.exchanges,
        inboxes.rank,
        inboxes.lane_words,
        RANKS=inboxes.ranks,
        LANES=triton.next_power_of_2(inboxes.ranks),
        SHARE=SHARE,
        num_warps=1,
        **early(values),
    )
    return tokens
