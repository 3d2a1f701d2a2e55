"""GPU memory that the ranks of a node map into each other's address space: the peer buffers.

torch's symmetric memory makes it. NVLink multicast is never asked for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from launcher_scripts.kernels.operands import PeerBuffers

# Of 8 bytes, for all ranks' parts of two exchanges: 64 rows of 8,192 numbers over four ranks.
PEER_BUFFER_WORDS = 1 << 22


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


class SymmetricMemory:
    """Peer buffers and what keeps them mapped; every rank of `group` makes one."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Raises RuntimeError where the memory cannot be shared."""
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        import torch.distributed._symmetric_memory as symmetric_memory

        lanes = (2, group.size(), lane_words(group.size()))
        buffer = symmetric_memory.empty(lanes, dtype=torch.int64, device=device).zero_()
        self._handle = symmetric_memory.rendezvous(buffer, group)
        self.peer_buffers = PeerBuffers(
            buffer,
            torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=device),
            torch.zeros(lanes[-1], dtype=torch.int32, device=device),
            group.rank(),
        )
        # No rank writes into a peer buffer before it is zeroed: the ranks agree on its use later.
        torch.cuda.synchronize(device)
