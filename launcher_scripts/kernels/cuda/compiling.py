"""Compilation of kernels: device properties, compile-time options, and tuned tile sizes.

Which tile a kernel uses for which shape: found once on a device, kept in tiles.json.

The table says what it was measured on; `python3 -m benchmarks.tune` measures it again. A key is a
product's kind and its weight's shape, "up 16384x4096", or its inputs alone, "up 4096", which holds
for other shapes. Weights in bytes have parts of their own; what fp8's lack, int8's have. What the
table does not name gets a tile by rule.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from launcher_scripts.common.quantization import FOUR_BITS, Quantization


def tell_of_compilation(begins: Callable[[], None], finished: Callable[[], None]) -> bool:
    """Call `begins` before every compilation in this process and `ended` after it.

    Returns whether this Triton can tell. The latest caller is told.
    """
    if find_spec("triton") is None:
        return True  # there is nothing to compile
    if find_spec("triton.knobs") is None:
        return False
    from triton import knobs

    def before(**_: object) -> bool:
        begins()
        return False  # Triton is to compile

    def after(**_: object) -> bool:
        finished()
        return False

    knobs.runtime.jit_cache_hook = before
    knobs.runtime.jit_post_compile_hook = after
    return True


def compiled_mark(parts: Iterable[object], device: torch.device) -> Path:
    """The file in Triton's cache that marks that it has the kernels that `parts` decide on.

    Its name is a digest of them, of the device's traits, and of the kernels' sources.
    """
    import triton

    sources = sorted(path for path in Path(__file__).parent.iterdir() if path.is_file())
    texts = [
        *map(repr, [*parts, traits_of(device), torch.__version__, triton.__version__]),
        *(source.read_text(encoding="utf-8") for source in sources),
    ]
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    return Path(triton.knobs.cache.dir) / f"{digest}.compiled"


@cache
def has_gluon() -> bool:
    """Return whether this Triton has the Gluon that hopper_attention is written in (from 3.6)."""
    from triton import __version__

    return tuple(int(number) for number in __version__.split(".")[:2]) >= (3, 6)


def settle_keys(package: str) -> None:
    """Have all processes find the same kernels in Triton's cache, whichever they launch first and
    whatever else they import.

    Triton's key of a function depends on which of the functions it calls had theirs before. So
    those of a package's imported modules get them before anything is launched, and what a function
    calls gets its own before it.
    """
    from triton.runtime.jit import JITFunction

    def settle(function: JITFunction[Any]) -> None:
        if function.hash is None:
            for name in function.fn.__code__.co_names:
                called = function.fn.__globals__.get(name)
                if isinstance(called, JITFunction) and called is not function:
                    settle(called)
        function.cache_key  # noqa: B018 (kept by the function)

    for name in sorted(name for name in sys.modules if name.startswith(f"{package}.")):
        for value in vars(sys.modules[name]).values():
            if isinstance(value, JITFunction):
                settle(value)


def launcher(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """kernel[grid], for launches whose first argument is a tensor.

    On the meta device, whose tensors have no values, a launch only compiles the kernel.
    """

    def launch(first: Any, *others: Any, **options: Any) -> None:
        if first.is_meta:
            kernel.warmup(first, *others, grid=grid, **options)
        else:
            kernel[grid](first, *others, **options)

    return launch


class _Compilers(ThreadPoolExecutor):
    """Threads that load what they have compiled, so that its first launch need not."""

    def submit(  # type: ignore[override]  # Triton passes a function alone
        self, compile_kernel: Callable[[], Any], /
    ) -> Future[Any]:
        return super().submit(self._compile, compile_kernel)

    def _compile(self, compile_kernel: Callable[[], Any]) -> Any:
        kernel = compile_kernel()
        kernel.run  # noqa: B018 (loads it, which raises where it does not fit)
        return kernel


@contextmanager
def compiling_in(threads: int) -> Iterator[None]:
    """In the block, so many threads compile what this one launches on the meta device.

    The block ends when they have. A kernel that fails is left to the first launch that needs it.
    """
    from triton import AsyncCompileMode

    with (
        launchers_kept_apart(),
        _Compilers(threads, "compiler") as compilers,
        AsyncCompileMode(compilers, ignore_errors=True),
    ):
        yield


@contextmanager
def launchers_kept_apart() -> Iterator[None]:
    """In the block, what Triton loads for one kernel is not changed by what it loads for another.

    The modules that launch kernels have one name. Where one is loaded a second time, Python gives
    the module of that name that was loaded last, with the contents of the one that is wanted:
    another thread may have that module in its hands, and would launch the wrong kernel.
    """
    from triton.runtime import build

    load, lock = build._load_module_from_path, Lock()

    def load_apart(name: str, path: str) -> Any:
        with lock:
            return SimpleNamespace(**vars(load(name, path)))

    build._load_module_from_path = load_apart
    try:
        yield
    finally:
        build._load_module_from_path = load


HOPPER = (9, 0)  # the first with programmatic dependent launch
ADA = (8, 9)  # the first with e4m3


class DeviceTraits(NamedTuple):
    """A GPU as its kernels see it; without a capability it is none, but interprets them.

    capability:   compute capability
    shared_bytes: shared memory that a program may have
    """

    capability: tuple[int, int] | None
    shared_bytes: int

    @property
    def has_pdl(self) -> bool:
        """Return whether kernels can use programmatic dependent launch."""
        return self.capability is not None and self.capability >= HOPPER

    @property
    def has_fp8(self) -> bool:
        """Return whether kernels can read e4m3."""
        return self.capability is None or self.capability >= ADA

    @property
    def has_fp8_products(self) -> bool:
        """Return whether torch multiplies e4m3 with e4m3, each row by a scale of its own."""
        return self.capability is not None and self.capability >= HOPPER

    @property
    def runs_ptx(self) -> bool:
        """Return whether kernels are compiled, and can have instructions of their own."""
        return self.capability is not None

    @property
    def adds_in_float32(self) -> bool:
        """Return whether products of other types can have float32 results."""
        return self.capability is not None


INTERPRETER = DeviceTraits(None, sys.maxsize)


@cache
def traits_of(device: torch.device) -> DeviceTraits:
    """The traits of a device: a CPU has those of the interpreter, the meta device those of the
    current GPU.
    """
    if device.type == "cpu":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(None if device.type == "meta" else device)
    capability = (properties.major, properties.minor)
    shared_bytes = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return DeviceTraits(capability, int(shared_bytes))


# Launch options of a kernel that starts when those before it have ended.
NO_PDL = {"USE_PDL": False}


def pdl_options(tensor: Tensor) -> dict[str, bool]:
    """Launch options of a kernel that starts before the one before it has ended, where it can."""
    return {"USE_PDL": True, "launch_pdl": True} if traits_of(tensor.device).has_pdl else NO_PDL


TABLE = Path(__file__).with_name("tiles.json")
SPLITS = {"add": 4, "router": 8}  # programs that share a product's columns; of other kinds 1
PACKED_SPLITS = {"add": 8, "heads": 4, "query": 4}  # the same of weights of four bits
PAIRED = ("heads", "gated")  # two rows of the weight for every row of the tile


class RowTile(NamedTuple):
    """rows of the weight per program, columns per piece, warps; whether pieces come in a loop."""

    rows: int
    block: int
    warps: int
    rolled: bool


class DotTile(NamedTuple):
    """rows of the weight per program (of weight and gate together), columns per piece, warps,
    pieces on their way, how many programs share the columns (where the parts are summed
    afterwards), and how many pieces of the weight are prefetched before gdc_wait."""

    rows: int
    block: int
    warps: int
    stages: int
    splits: int
    prefetch: int = 0

    def fitting(self, batch: int, weight_bytes: int, shared_bytes: int) -> DotTile:
        """With no more pieces on their way than a program's shared memory holds.

        A piece has `rows` of the weight, of weight_bytes each, and `batch` of the inputs: two bytes
        each, which for int8 are a high and a low one. Tiles are measured with fewer rows of inputs
        than there may be.
        """
        piece = self.block * (self.rows * weight_bytes + 2 * batch)
        return self._replace(stages=max(1, min(self.stages, shared_bytes // piece)))

    def dividing(self, in_size: int, columns: int) -> DotTile:
        """With as many columns and splits, up to its own, as divide the inputs in pieces of so many
        columns; nothing is prefetched."""
        pieces = -(-in_size // columns)
        at_once = _divisor(pieces, self.block // columns)
        splits = _divisor(pieces // at_once, self.splits)
        return self._replace(block=at_once * columns, splits=splits, prefetch=0)


def _divisor(number: int, largest: int) -> int:
    return next((n for n in range(largest, 1, -1) if number % n == 0), 1)


@cache
def dot_tile(
    kind: str, out_size: int, in_size: int, quantization: Quantization | None = None
) -> DotTile:
    """The tile of a product with a few rows: kind is plain, heads, query, add, up, gated, router
    or largest; quantization: the weight's."""
    tile = known_tile("dot_products", kind, out_size, in_size, quantization)
    if tile:
        return DotTile(*tile)
    if quantization in FOUR_BITS:
        return DotTile(128, 256, 4, 3, PACKED_SPLITS.get(kind, 1))
    return DotTile(64, 256 if quantization else 128, 4, 4, SPLITS.get(kind, 1))


@cache
def row_tile(
    kind: str, out_size: int, in_size: int, quantization: Quantization | None = None
) -> RowTile:
    """The tile of a product with one row: kind is plain, add, up, gated, heads or largest;
    quantization: the weight's."""
    tile = known_tile("row_products", kind, out_size, in_size, quantization)
    return RowTile(*tile) if tile else _row_rule(kind, in_size, quantization)


def known_tile(
    products: str, kind: str, out_size: int, in_size: int, quantization: Quantization | None
) -> list[Any] | None:
    parts = [part(products, quantization)]
    if quantization == "fp8":
        parts.append(part(products, "int8"))
    if quantization in FOUR_BITS:
        parts.append(part(products, "int4"))
    keys = (f"{kind} {out_size}x{in_size}", f"{kind} {in_size}")
    candidates = (table().get(name, {}).get(key) for name in parts for key in keys)
    return next(filter(None, candidates), None)


def part(products: str, quantization: Quantization | None) -> str:
    """Section of the table: row_products or dot_products."""
    return f"{quantization}_{products}" if quantization else products


@cache
def table() -> dict[str, dict[str, list[Any]]]:
    """Return the contents of tiles.json. Who changes it calls `forget`."""
    tiles: dict[str, dict[str, list[Any]]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return tiles


def forget() -> None:
    """Look tiles up again in the table, which has changed."""
    for function in (row_tile, dot_tile):
        function.cache_clear()


def _row_rule(kind: str, in_size: int, quantization: Quantization | None) -> RowTile:
    rows = (8 if quantization else 4) // (2 if kind in PAIRED else 1)
    if quantization in FOUR_BITS:
        block = min(4096, max(64, 1 << (in_size - 1).bit_length()))
        return RowTile(rows, block, 4, False)
    if in_size >= 4096:
        return RowTile(rows, 2048, 8, in_size > 12288)
    block = 1024
    while block > 8 and block // 2 >= in_size:
        block //= 2
    return RowTile(rows, block, 4, False)
