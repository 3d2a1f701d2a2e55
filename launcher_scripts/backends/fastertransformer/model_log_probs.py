"""The answer's tensors that hold the model's own log-probabilities, of every family."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from launcher_scripts.backends.fastertransformer.row_values import beam_axis
from launcher_scripts.protocol import GenerateOutput, ModelLogProbs


def model_log_probs(outputs: Sequence[GenerateOutput], longest: int) -> dict[str, Tensor]:
    """Those of generated tokens [B, beam, longest] and of prompts [B, longest prompt], each with
    [..., K] of the likeliest tokens; nothing of what no row has asked for.

    0 after a row's tokens, for rows not asked, and beyond a row's own K. Only the first of the
    beams has any: a beam search has none.
    """
    generated = [output.token_log_probs for output in outputs]
    prompts = [output.prompt_log_probs for output in outputs]
    names = ("token_log_probs", "token_ranks", "top_log_prob_ids", "top_log_probs")
    tensors = {}
    for name, tensor in zip(names, _filled(generated, longest), strict=False):
        beams = tensor.new_zeros(len(outputs), beam_axis(outputs), *tensor.shape[1:])
        beams[:, 0] = tensor
        tensors[name] = beams
    names = ("prompt_log_probs", "prompt_ranks", "prompt_top_ids", "prompt_top_log_probs")
    lengths = [0 if each is None else len(each.log_probs) for each in prompts]
    tensors.update(zip(names, _filled(prompts, max(1, *lengths)), strict=False))
    return tensors


def _filled(rows: Sequence[ModelLogProbs | None], longest: int) -> list[Tensor]:
    """Log-probabilities and ranks [B, longest] and, if any row has some, the ids and
    log-probabilities [B, longest, K] of the likeliest; nothing where no row was asked.
    """
    asked = {row: each for row, each in enumerate(rows) if each is not None}
    if not asked:
        return []
    most = max(each.top_ids.shape[1] for each in asked.values())
    fields = ["log_probs", "ranks", *(["top_ids", "top_log_probs"] if most else [])]
    filled = []
    for field in fields:
        values = {row: getattr(each, field) for row, each in asked.items()}
        some = next(iter(values.values()))
        whole = some.new_zeros(len(rows), longest, *([most] if some.dim() == 2 else []))
        for row, own in values.items():
            whole[(row, *map(slice, own.shape))] = own
        filled.append(whole)
    return filled
