"""How near a norm and the projection behind it come to float64, of one row and of two.

    python3 -m benchmarks.norm_errors [--sizes 2048 4096] [--seeds 4] [--worst]

The hidden states are normal numbers with a mean (in deviations) or with one large channel. They are
made as a decode step makes them and read as its projections do. One row has its norm folded into
the kernels around it, two rows have it before the product. Errors are relative to the result.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

from launcher_scripts.common.quantization import QUANTIZATIONS
from launcher_scripts.engine.model.families import kernels_for
from launcher_scripts.kernels.operands import (
    AttentionScores,
    EmbeddingTables,
    Heads,
    Hidden,
    LayerCache,
    Linear,
    Norm,
    RowColumns,
    StepRows,
)
from launcher_scripts.kernels.quantization import dequantized, quantized

STATES = ("mean 0", "mean 1", "mean 10", "mean 100", "mean 1000")
CHANNELS = ("channel 3e3", "channel 1e5", "channel 1e6")
NORMS = ("layernorm", "rmsnorm")
WEIGHTS = ("bf16", "fp16", "int8 bf16", "int8 fp16", "fp8 bf16", "fp8 fp16")
MADE = ("hidden", "start", "after", "later")  # as such, from the embeddings, as a sum, a layer on
MOVED = ("comes", "goes")  # the large channel, in the sum
READ = ("project", "gated", "heads", "head")
HEAD_SIZE = 16
SCORES = AttentionScores(HEAD_SIZE**-0.5)


@dataclass(frozen=True)
class Bench:
    """Kernels and sizes; tensors are random, and the same for any number of rows."""

    kernels: ModuleType
    device: str
    size: int
    out: int
    norm: str
    weights: str

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.weights.endswith("bf16") else torch.float16

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device)

    def state(self, name: str) -> Tensor:
        """Float32 [1, size]"""
        what, value = name.split()
        x = self.random(1, self.size)
        if what == "mean":
            return x + float(value)
        x[0, self.size // 3] = float(value)
        return x

    def make_norm(self) -> Norm:
        gain, bias = 1 + 0.3 * self.random(self.size), 0.3 * self.random(self.size)
        return Norm(self.norm, gain, bias if self.norm == "layernorm" else None, 1e-6)

    def linear(self, norm: Norm | None, weight: Tensor) -> Linear:
        if quantization := QUANTIZATIONS.get(self.weights.split()[0]):
            return quantized(Linear(weight, None, norm), self.dtype, quantization)
        return Linear(weight.to(self.dtype), None, norm)

    def first(self, norm: Norm) -> Linear:
        return self.linear(norm, self.random(self.out, self.size) / math.sqrt(self.size))

    def made(self, how: str, state: str, norm: Norm, rows: int) -> Hidden:
        """Hidden states of so many equal rows."""
        if how == "start":
            return self._embedded(self.state(state), norm, rows)
        wanted, plain = self.state(state), self.random(1, self.size)
        before = {"comes": plain, "goes": wanted}.get(how, wanted)
        x = self.kernels.hidden(before.repeat(rows, 1), norm, self.dtype)
        if how == "hidden":
            return x
        if how == "later":
            x = self._a_little_on(x, norm)
        self.kernels.attend_own(x, *self._attended(x, self.first(norm)), 1, SCORES)
        weight = 0.3 * self.random(self.size, 64) / 8
        inner = self.random(1, 64)
        if how in MOVED:
            moved = float(state.split()[1]) * (1 if how == "comes" else -1)
            inner[0, 0] = 100.0
            weight[:, 0] = 0
            weight[self.size // 3, 0] = moved / 100
        last = self.linear(None, weight)
        return self.accumulate(inner.repeat(rows, 1).to(self.dtype), last, x, norm)

    def _a_little_on(self, x: Hidden, norm: Norm) -> Hidden:
        inner = 0.1 * self.random(1, 64).repeat(x.exact.shape[0], 1)
        last = self.linear(None, self.random(self.size, 64) / 8)
        self.kernels.attend_own(x, *self._attended(x, self.first(norm)), 1, SCORES)
        return self.accumulate(inner.to(self.dtype), last, x, norm)

    def accumulate(self, x: Tensor, last: Linear, onto: Hidden, norm: Norm) -> Hidden:
        return self.kernels.accumulate(x, last, onto, norm)

    def _embedded(self, state: Tensor, norm: Norm, rows: int) -> Hidden:
        table = state.clamp(-6e4, 6e4).to(self.dtype)  # float16 holds no more
        columns = RowColumns(*torch.zeros(5, rows + 1, dtype=torch.int64, device=self.device))
        history = torch.zeros(4, dtype=torch.int64, device=self.device)
        slots = torch.arange(rows, device=self.device)
        tables = EmbeddingTables(table, 0, None)
        return self.kernels.begin_step(slots, columns, history, tables, norm)[0]

    def read(self, how: str, x: Hidden, norm: Norm) -> tuple[Tensor, Tensor]:
        """What a projection makes of the first row, and that in float64."""
        first = self.first(norm)
        want = normalized(x.exact[:1], norm) @ dequantized(first.weight, first.scale).double().T
        if how == "project":
            got = self.kernels.project_hidden(x, self.kernels.prepare(first))[:1]
        elif how == "gated":
            gate = self.first(norm)
            other = dequantized(gate.weight, gate.scale).double().T
            want = functional.silu(want) * (normalized(x.exact[:1], norm) @ other)
            both = self.kernels.prepare(first), self.kernels.prepare(gate)
            got = self.kernels.expand(x, *both, "silu")[:1]
        elif how == "heads":
            got = self._queries(x, first)
            want = want[:, : got.shape[1]]
        else:
            held = self.out // 2 + 1
            values, places = self.kernels.largest(x, self.kernels.prepare(first), held)
            got, want = values[:1], want[0, places[:1]]
        return got, want

    def _queries(self, x: Hidden, first: Linear) -> Tensor:
        return self.kernels.project_heads(x, *self._attended(x, first))[:1].flatten(1)

    def _attended(self, x: Hidden, first: Linear) -> tuple[object, ...]:
        """What follows x in the arguments of project_heads, for rows without tokens."""
        heads = Heads(self.out // HEAD_SIZE - 2, 1, HEAD_SIZE)
        rows = x.exact.shape[0]
        pool = torch.zeros(1, rows, HEAD_SIZE, dtype=self.dtype, device=self.device)
        starts = torch.arange(rows, device=self.device)
        step = StepRows(starts, torch.zeros_like(starts), torch.ones_like(starts))
        cache = LayerCache(pool, pool.clone())
        return self.kernels.prepare(first), heads, None, step, cache

    def error(self, made: str, read: str, state: str, rows: int, seeds: int) -> float:
        """Relative error of the first row, the root of the mean square over so many seeds; where a
        channel is large, one error of its rounding is nearly all of a seed's."""
        found = []
        for seed in range(seeds):
            torch.manual_seed(seed)
            norm = self.make_norm()
            x = self.made(made, state, norm, rows)
            got, want = self.read(read, x, norm)
            found.append(((got.double() - want).norm() / want.norm()).item())
        return math.sqrt(sum(value**2 for value in found) / seeds)


def normalized(x: Tensor, norm: Norm) -> Tensor:
    """The norm of x [1, size] in float64."""
    x = x.double()
    if norm.kind == "layernorm":
        x = x - x.mean()
    x = x / (x.square().mean() + norm.eps).sqrt() * norm.weight.double()
    return x if norm.bias is None else x + norm.bias.double()


def cases() -> list[tuple[str, str, str]]:
    """How hidden states are made, how they are read, and what they are."""
    every = list(itertools.product(MADE, ("project",), STATES + CHANNELS))
    every += itertools.product(MOVED, ("project",), CHANNELS)
    return every + list(itertools.product(("after",), READ[1:], STATES + CHANNELS))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", type=int, default=[2048, 4096])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--worst", action="store_true", help="only ratios above 1.5")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("there is no CUDA device: the errors are those of its kernels", file=sys.stderr)
        return 1
    kernels = kernels_for("cuda")
    print(f"{'size':>5} {'norm':9} {'weights':9} {'made':6} {'read':7} {'state':11}", end="")
    print("  one row  two rows  ratio")
    for size, norm, weights in itertools.product(arguments.sizes, NORMS, WEIGHTS):
        bench = Bench(kernels, "cuda", size, size, norm, weights)
        for made, read, state in cases():
            one, two = (bench.error(made, read, state, rows, arguments.seeds) for rows in (1, 2))
            ratio = one / two
            if arguments.worst and ratio <= 1.5:
                continue
            print(
                f"{size:5} {norm:9} {weights:9} {made:6} {read:7} {state:11}"
                f"  {one:.1e}   {two:.1e}  {ratio:5.2f}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
