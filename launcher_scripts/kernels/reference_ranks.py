"""The largest logit where every tensor-parallel rank has the logits of its part of the vocabulary.

Each rank finds its own and the ranks exchange (value, id), a few bytes instead of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from launcher_scripts.kernels.operands import Ranks

EXACT_IDS = 1 << 24  # float32 holds every smaller integer; ids travel beside the logits


def largest_of_ranks(values: Tensor, ids: Tensor, ranks: Ranks) -> Tensor:
    """The id of every row's largest value, int64 [N], the lowest id of equal ones.

    values, ids: this rank's largest logits, float32 [N], and their ids, int64 [N] below EXACT_IDS;
                 -inf where it has none
    """
    everyone = ranks.tp_stack(torch.stack([values, ids.float()]))  # [tp, 2, N]
    # The first of equal values is the lowest rank's, which holds the lowest ids.
    winner = everyone[:, 0].argmax(0, keepdim=True)  # [1, N]
    return everyone[:, 1].gather(0, winner)[0].long()
