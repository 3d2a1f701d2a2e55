"""T5's relative positions (Raffel et al. 2020): from buckets to a bias per distance."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from launcher_scripts.kernels.operands import RelativeBias


def relative_bias(table: Tensor, max_distance: int, *, bidirectional: bool) -> RelativeBias:
    """table [heads, buckets], as stored, by distance.

    bidirectional: keys before and after the query have buckets of their own; else only those
    before it count
    """
    buckets = table.shape[1]
    reach = max(max_distance, buckets)  # every distance from here on is in the last bucket
    distances = torch.arange(-reach, reach + 1, device=table.device)
    places = distance_buckets(distances, buckets, max_distance, bidirectional=bidirectional)
    return RelativeBias(table.float()[:, places].contiguous())


def distance_buckets(
    distances: Tensor, buckets: int, max_distance: int, *, bidirectional: bool
) -> Tensor:
    """The bucket of every key - query in `distances`.

    Half of the buckets are exact, the others logarithmic up to max_distance; in both directions
    the upper half of all buckets is for keys after the query. Rounds as transformers does.
    """
    offset = torch.zeros_like(distances)
    away = (-distances).clamp(min=0)
    if bidirectional:
        buckets //= 2
        offset = (distances > 0) * buckets
        away = distances.abs()
    exact = buckets // 2
    spread = torch.log(away.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = exact + (spread * (buckets - exact)).long()
    return offset + torch.where(away < exact, away, far.clamp(max=buckets - 1))
