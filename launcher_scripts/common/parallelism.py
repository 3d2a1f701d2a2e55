"""Tensor- and pipeline-parallel sizes and their rank arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from launcher_scripts.common.errors import ConfigError, problem

# No cluster shares one layer or one server among more.
MAX_RANKS = 1 << 16


@dataclass(frozen=True)
class Parallelism:
    """`tp_size` ranks share every layer, `pp_size` groups of them share the layers.

    Tensor-parallel ranks are neighbours, as in FasterTransformer and Megatron:
    rank = pp_rank * tp_size + tp_rank.
    """

    tp_size: int = 1
    pp_size: int = 1

    def __post_init__(self) -> None:
        for name in ("tp_size", "pp_size"):
            if getattr(self, name) < 1:
                raise ConfigError(problem(f"{name} must be at least 1", got=getattr(self, name)))

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size

    def tp_rank(self, rank: int) -> int:
        return rank % self.tp_size

    def pp_rank(self, rank: int) -> int:
        return rank // self.tp_size

    def rank(self, tp_rank: int, pp_rank: int) -> int:
        return pp_rank * self.tp_size + tp_rank

    def tp_group(self, pp_rank: int) -> range:
        """The ranks that share the layers of one pipeline stage."""
        return range(pp_rank * self.tp_size, (pp_rank + 1) * self.tp_size)

    def layers(self, num_layers: int, pp_rank: int) -> range:
        """Global numbers of the layers that one pipeline stage holds.

        Sizes differ by at most one and earlier stages hold the longer part. Files carry global
        layer numbers, so this division is the engine's own.
        """
        base, longer = divmod(num_layers, self.pp_size)
        start = pp_rank * base + min(pp_rank, longer)
        return range(start, start + base + (1 if pp_rank < longer else 0))

    def nodes(self, gpus_per_node: int) -> int:
        """Number of nodes of `gpus_per_node` GPUs that all ranks need."""
        return -(-self.world_size // gpus_per_node)

    def spread(self, nodes: int) -> int:
        """Over how many of `nodes` nodes the ranks go, evenly: the most that divide them."""
        return max(count for count in divisors(self.world_size) if count <= nodes)


def divisors(number: int) -> list[int]:
    """The divisors up to MAX_RANKS, ascending: tensor-parallel sizes that `number` heads allow."""
    limit = min(number, MAX_RANKS)
    return [candidate for candidate in range(1, limit + 1) if number % candidate == 0]
