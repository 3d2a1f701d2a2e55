"""The answer's tensors that hold the model's own log-probabilities, of every family."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from launcher_scripts.backends.fastertransformer.row_values import beam_axis
from launcher_scripts.contract.protocol import GenerateOutput, ModelLogProbs

# tensor of the contract -> field of ModelLogProbs
_GENERATED = {
    "token_log_probs": "log_probs",
    "token_ranks": "ranks",
    "top_log_prob_ids": "top_ids",
    "top_log_probs": "top_log_probs",
}
_OF_PROMPT = {
    "prompt_log_probs": "log_probs",
    "prompt_ranks": "ranks",
    "prompt_top_ids": "top_ids",
    "prompt_top_log_probs": "top_log_probs",
}


def model_log_probs(
    outputs: Sequence[GenerateOutput], longest: int, wanted: Collection[str]
) -> dict[str, Tensor]:
    """Those of generated tokens [B, beam, longest] and of prompts [B, longest prompt], each with
    [..., K] of the likeliest; of those that are `wanted` the ones that any row has asked for.

    0 after a row's tokens, for rows not asked, and beyond a row's own K. Only the first of the
    beams has any: a beam search has none.
    """
    rows = {at: each.token_log_probs for at, each in enumerate(outputs) if each.token_log_probs}
    generated = _filled(rows, (len(outputs), longest), _GENERATED, wanted)
    for name, tensor in generated.items():
        generated[name] = tensor.new_zeros(len(outputs), beam_axis(outputs), *tensor.shape[1:])
        generated[name][:, 0] = tensor
    rows = {at: each.prompt_log_probs for at, each in enumerate(outputs) if each.prompt_log_probs}
    shape = (len(outputs), max([1, *(len(each.log_probs) for each in rows.values())]))
    return {**generated, **_filled(rows, shape, _OF_PROMPT, wanted)}


def _filled(
    rows: Mapping[int, ModelLogProbs],
    shape: tuple[int, int],
    fields: Mapping[str, str],
    wanted: Collection[str],
) -> dict[str, Tensor]:
    """The rows' fields in tensors of `shape`, [B, tokens] or, with the K likeliest, [B, tokens, K];
    without these where K is 0.
    """
    filled = {}
    for name, field in fields.items():
        values = {at: getattr(each, field) for at, each in rows.items() if name in wanted}
        sizes = [own.shape[1:].numel() for own in values.values()]
        if not any(sizes):
            continue
        some = next(iter(values.values()))
        whole = some.new_zeros(*shape, *([max(sizes)] if some.dim() == 2 else []))
        for at, own in values.items():
            whole[(at, *map(slice, own.shape))] = own
        filled[name] = whole
    return filled
