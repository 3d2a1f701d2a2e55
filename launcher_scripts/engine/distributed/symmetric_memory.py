"""Sums over GPUs that read each other's memory: half of NCCL's time for a few kilobytes.

One buffer per rank is mapped into every rank of its tensor-parallel group. A one-shot sum has each
rank read all buffers; a two-shot sum has it add up its slice and read the others' results, which
moves fewer bytes and waits once more. Both can be recorded in CUDA graphs. NVLink multicast is
never asked for.

For sums that a kernel takes part in, as the last of a projection, every rank has a
peer buffer too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import Enum

import torch
import torch.distributed as dist
from torch import Tensor

from launcher_scripts.kernels.operands import PeerBuffers

# Where a two-shot sum with its copy into the buffer overtakes a one-shot sum, which copies itself.
ONE_SHOT_BYTES = 512 << 10
BUFFER_BYTES = 8 << 20
PEER_BUFFER_WORDS = 1 << 20  # of 8 bytes, for all ranks' parts of two exchanges
WIDEST_ACCESS = 16  # bytes; the kernels want the tensor aligned as the buffer is


class Route(Enum):
    """How a sum travels."""

    ONE_SHOT = "one-shot"
    TWO_SHOT = "two-shot"
    PROCESS_GROUP = "process group"


def choose_route(tensor: Tensor) -> Route:
    """By size: float32 tensors that fit the buffer are summed through it, others are not."""
    size = tensor.numel() * tensor.element_size()
    if tensor.dtype != torch.float32 or not 0 < size <= BUFFER_BYTES:
        return Route.PROCESS_GROUP
    return Route.ONE_SHOT if size <= ONE_SHOT_BYTES else Route.TWO_SHOT


def lane_words(ranks: int) -> int:
    """How many words a rank can send at a time: what it sends to so many ranks is bounded."""
    return PEER_BUFFER_WORDS // (2 * ranks)


def unsupported_reason(peers: Sequence[tuple[str, torch.device]]) -> str | None:
    """Why ranks on these hosts and devices cannot sum through each other's memory, if so."""
    if any(device.type != "cuda" for _, device in peers):
        return "the ranks are not on CUDA devices"
    if len({host for host, _ in peers}) > 1:
        return "the ranks are on different nodes"
    for _, device in peers:
        for _, peer in peers:
            if device != peer and not torch.cuda.can_device_access_peer(device, peer):
                return f"{device} has no peer access to {peer}"
    return None


class SymmetricSums:
    """The sums of one rank; every rank of `group` makes one and calls it in the same order."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Raises RuntimeError where the memory cannot be shared."""
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        import torch.distributed._symmetric_memory as symmetric_memory

        self._group_name = group.group_name
        self._buffer = symmetric_memory.empty(
            BUFFER_BYTES // torch.float32.itemsize, dtype=torch.float32, device=device
        )
        self._handle = symmetric_memory.rendezvous(self._buffer, group)
        lanes = (2, group.size(), lane_words(group.size()))
        buffer = symmetric_memory.empty(lanes, dtype=torch.int64, device=device).zero_()
        self._buffer_handle = symmetric_memory.rendezvous(buffer, group)
        self.peer_buffers = PeerBuffers(
            buffer,
            torch.tensor(self._buffer_handle.buffer_ptrs, dtype=torch.int64, device=device),
            torch.zeros(lanes[-1], dtype=torch.int32, device=device),
            group.rank(),
        )
        # No rank writes into a peer buffer before it is zeroed: the ranks agree on its use later.
        torch.cuda.synchronize(device)

    def sum(self, tensor: Tensor, route: Route) -> Tensor:
        """The sum over the ranks as a new tensor; `route` is a one-shot or a two-shot sum."""
        tensor = tensor.contiguous()
        if tensor.data_ptr() % WIDEST_ACCESS:
            tensor = tensor.clone()
        buffer = self._buffer[: tensor.numel()].view(tensor.shape)
        operations = torch.ops.symm_mem
        if route is Route.ONE_SHOT:
            total: Tensor = operations.one_shot_all_reduce_copy(
                buffer, tensor, "sum", self._group_name
            )
            return total
        total = torch.empty_like(tensor)
        buffer.copy_(tensor)
        operations.two_shot_all_reduce_out(buffer, "sum", self._group_name, total)
        return total
