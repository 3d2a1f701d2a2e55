"""The tensors that the test clients send: one value for every row, and empty words lists."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np

from launcher_scripts.clients.connection import NUMPY_TYPES, Tensors
from launcher_scripts.contract.tensors import GPT_INPUTS

_TYPES = {tensor.name: NUMPY_TYPES[tensor.dtype] for tensor in GPT_INPUTS}
# Eight prompts of eight ids: common English words in the vocabulary of GPT-2.
PROMPTS = (
    (464, 318, 257, 290, 262, 286, 340, 373),
    (383, 326, 339, 284, 307, 287, 257, 318),
    (314, 423, 407, 284, 307, 319, 262, 373),
    (340, 318, 326, 345, 481, 307, 351, 262),
    (383, 373, 287, 262, 290, 340, 318, 286),
    (345, 460, 307, 319, 257, 351, 339, 290),
    (326, 373, 262, 286, 257, 284, 345, 423),
    (339, 481, 423, 340, 287, 383, 290, 464),
)


def rows_of(rows: int, **values: Any) -> Tensors:
    """The contract's tensors of these names, [rows, 1] each, the same value in every row."""
    return {name: np.full((rows, 1), value, _TYPES[name]) for name, value in values.items()}


def sampling_tensors(flags: argparse.Namespace, rows: int, *, log_probs: bool) -> Tensors:
    """How tokens are chosen, [rows, 1] each; start and end token are the checkpoint's own."""
    return rows_of(
        rows,
        runtime_top_k=flags.topk,
        runtime_top_p=flags.topp,
        beam_search_diversity_rate=0.0,
        temperature=1.0,
        len_penalty=1.0,
        repetition_penalty=1.0,
        random_seed=0,
        is_return_log_probs=log_probs,
        beam_width=flags.beam_width,
    )


def no_words(rows: int) -> Tensors:
    """Words lists without a word, INT32 [rows, 2, 1]."""
    empty = np.tile(np.array([[0], [-1]], np.int32), (rows, 1, 1))
    return {"bad_words_list": empty, "stop_words_list": empty.copy()}


def prompt_ids(random: bool, batch_size: int, length: int, vocab_size: int) -> Any:
    """UINT32 [rows, length]: random ids, the same in every run, or the eight fixed prompts.

    Says on stderr that other sizes than theirs need random ids, as in the original's clients.
    """
    if not random:
        fixed = np.array(PROMPTS, np.uint32)
        if fixed.shape != (batch_size, length):
            rows, ids = fixed.shape
            print(
                f"warning: the fixed prompts are {rows} rows of {ids} ids; --batch_size and "
                "--start_len count with --random_start_ids alone",
                file=sys.stderr,
            )
        return fixed
    generator = np.random.default_rng([batch_size, length])
    return generator.integers(0, vocab_size, (batch_size, length), dtype=np.uint32)
