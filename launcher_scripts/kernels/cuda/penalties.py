"""Biases, penalties and forbidden tokens in the Triton language: see reference_sampling.process.

Only the logits of tokens that a row has change, so a program goes through the row's tokens. A token
that the row has several times changes once: each of its places writes its number where the logit
was, and the place whose number is there in the end, whichever it is, changes the logit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.kernels.cuda.compiling import launcher
from launcher_scripts.kernels.cuda.device_traits import pdl_options
from launcher_scripts.kernels.cuda.shares import LARGEST, temperature_factor
from launcher_scripts.kernels.operands import SamplingColumns

BLOCK = 1024  # tokens of a row that are looked at at once


@triton.jit
def _tokens(history, first, last, size, BLOCK: tl.constexpr):
    """A block of a row's places, its ids there, and which of these have logits."""
    places = first + tl.arange(0, BLOCK)
    ids = tl.load(history + places, mask=places < last, other=-1)
    return places, ids, (ids >= 0) & (ids < size)  # virtual tokens are negative


@triton.jit
def _penalized(
    logit,
    count,
    slot,
    temperature,
    repetition_penalty,
    presence_penalty,
    frequency_penalty,
    output_presence_penalty,
):
    """Logits of tokens that the row has, `count` times among those it has generated."""
    repetition = tl.load(repetition_penalty + slot)
    logit = tl.where(logit < 0, logit * repetition, tl.div_rn(logit, repetition))
    logit = logit - tl.load(frequency_penalty + slot) * count.to(tl.float32)
    logit = logit - tl.where(count > 0, tl.load(output_presence_penalty + slot), 0.0)
    factor = temperature_factor(temperature, slot)
    logit = logit - tl.div_rn(tl.load(presence_penalty + slot), factor)
    return tl.minimum(tl.maximum(logit, -LARGEST), LARGEST)


@triton.jit
def _without_repeats(row_logits, history, length, n, size, BLOCK: tl.constexpr):
    """-inf at every token that followed the row's last n - 1 tokens before; n of 0: nowhere."""
    for first in range(0, tl.where(n > 0, length, 0), BLOCK):
        places, ids, held = _tokens(history, first, length, size, BLOCK)
        held = held & (places >= n - 1)
        for back in range(1, tl.minimum(n, length + 1)):
            earlier = tl.load(history + places - back, mask=held, other=-1)
            held = held & (earlier == tl.load(history + length - back))
        tl.store(row_logits + ids, -float("inf"), mask=held)


@triton.jit
def _add_biases(row_logits, ids, values, count, BLOCK: tl.constexpr):
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        token = tl.load(ids + at, mask=at < count, other=0)
        logit = tl.load(row_logits + token, mask=at < count, other=0.0)
        bias = tl.load(values + at, mask=at < count, other=0.0)
        tl.store(row_logits + token, logit + bias, mask=at < count)
    tl.debug_barrier()


@triton.jit
def _without_words(row_logits, history, length, ids, lengths, count, BLOCK: tl.constexpr):
    """-inf at every token that would complete a word."""
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        size = tl.load(lengths + at, mask=at < count, other=0)
        completed = (size > 0) & (length >= size - 1)
        for back in range(1, tl.minimum(tl.max(size, 0), length + 1)):
            earlier = tl.load(ids + at - back, mask=completed & (back < size), other=-1)
            latest = tl.load(history + length - back)
            completed = completed & ((back >= size) | (earlier == latest))
        token = tl.load(ids + at, mask=completed, other=0)
        tl.store(row_logits + token, -float("inf"), mask=completed)


@triton.jit
def process_rows(
    logits,
    history,
    counts,
    winners,
    saved,
    slots,
    start,
    length,
    prompt_length,
    end_id,
    min_length,
    no_repeat_ngram_size,
    bias_count,
    word_count,
    temperature,
    repetition_penalty,
    presence_penalty,
    frequency_penalty,
    output_presence_penalty,
    bias_ids,
    bias_values,
    word_ids,
    word_lengths,
    stride,
    size,
    LISTED: tl.constexpr,
    USE_PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: a row's logits.  counts, winners, saved: room for its tokens"""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    row_logits = logits + row * stride
    first_token = tl.load(start + slot)
    history, counts = history + first_token, counts + first_token
    winners, saved = winners + first_token, saved + first_token
    tokens, prompt = tl.load(length + slot).to(tl.int32), tl.load(prompt_length + slot)
    listed = slot * LISTED
    biases = tl.load(bias_count + slot).to(tl.int32)
    _add_biases(row_logits, bias_ids + listed, bias_values + listed, biases, BLOCK)
    penalized = tl.load(repetition_penalty + slot) != 1.0
    penalized = penalized | (tl.load(presence_penalty + slot) != 0.0)
    penalized = penalized | (tl.load(frequency_penalty + slot) != 0.0)
    penalized = penalized | (tl.load(output_presence_penalty + slot) != 0.0)
    last = tl.where(penalized, tokens, 0)
    for first in range(0, last, BLOCK):
        places, ids, held = _tokens(history, first, last, size, BLOCK)
        tl.store(saved + places, tl.load(row_logits + ids, mask=held), mask=held)
        tl.store(counts + places, 0, mask=held)
    tl.debug_barrier()
    for first in range(0, last, BLOCK):
        places, ids, held = _tokens(history, first, last, size, BLOCK)
        tl.store(row_logits + ids, places.to(tl.float32, bitcast=True), mask=held)
    tl.debug_barrier()
    for first in range(0, last, BLOCK):
        places, ids, held = _tokens(history, first, last, size, BLOCK)
        winner = tl.load(row_logits + ids, mask=held, other=0.0).to(tl.int32, bitcast=True)
        tl.store(winners + places, winner, mask=held)
        tl.atomic_add(counts + winner, 1, mask=held & (places >= prompt), sem="relaxed")
    tl.debug_barrier()
    for first in range(0, last, BLOCK):
        places, ids, held = _tokens(history, first, last, size, BLOCK)
        held = held & (tl.load(winners + places, mask=held, other=-1) == places)
        changed = _penalized(
            tl.load(saved + places, mask=held, other=0.0),
            tl.load(counts + places, mask=held, other=0),
            slot,
            temperature,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            output_presence_penalty,
        )
        tl.store(row_logits + ids, changed, mask=held)
    tl.debug_barrier()
    end = tl.load(end_id + slot)
    early = tokens - prompt < tl.load(min_length + slot)
    tl.store(row_logits + end, -float("inf"), mask=early & (end >= 0) & (end < size))
    words = tl.load(word_count + slot).to(tl.int32)
    _without_words(
        row_logits, history, tokens, word_ids + listed, word_lengths + listed, words, BLOCK
    )
    n = tl.load(no_repeat_ngram_size + slot)
    _without_repeats(row_logits, history, tokens, n, size, BLOCK)


def process(logits: Tensor, slots: Tensor, columns: SamplingColumns, history: Tensor) -> Tensor:
    """See reference_sampling.process."""
    rows, size = logits.shape
    tokens = history.shape[0]
    counts = torch.empty(tokens, dtype=torch.int32, device=logits.device)
    winners, saved = torch.empty_like(counts), torch.empty_like(counts, dtype=torch.float32)
    launcher(process_rows, (rows,))(
        logits,
        history,
        counts,
        winners,
        saved,
        slots,
        columns.start,
        columns.length,
        columns.prompt_length,
        columns.end_id,
        columns.min_length,
        columns.no_repeat_ngram_size,
        columns.bias_count,
        columns.word_count,
        columns.temperature,
        columns.repetition_penalty,
        columns.presence_penalty,
        columns.frequency_penalty,
        columns.output_presence_penalty,
        columns.bias_ids,
        columns.bias_values,
        columns.word_ids,
        columns.word_lengths,
        logits.stride(0),
        size,
        LISTED=columns.word_ids.shape[1],
        BLOCK=BLOCK,
        num_warps=8,
        enable_fp_fusion=False,
        **pdl_options(logits),
    )
    return logits
