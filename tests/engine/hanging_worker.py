"""A rank that hangs at its 20th step, in the way the environment says, while its beat goes on."""

from __future__ import annotations

import os
import sys
import time

from torch import Tensor

from launcher_scripts.engine.distributed.communicator import ProcessGroupCommunicator
from launcher_scripts.engine.ranks.worker import main

WAY_VARIABLE = "TEST_HANGS_WHILE"
STEP = 20
_sum = ProcessGroupCommunicator.tp_sum
_receive = ProcessGroupCommunicator.from_previous_stage


def _hang(communicator: ProcessGroupCommunicator, size: int) -> None:
    if communicator.progress.heartbeat().step >= STEP:
        if os.environ[WAY_VARIABLE] == "computing":
            time.sleep(3600)
        with communicator.progress.exchange("all_reduce", size):
            time.sleep(3600)


def tp_sum(self: ProcessGroupCommunicator, tensor: Tensor) -> Tensor:
    _hang(self, tensor.nbytes)
    return _sum(self, tensor)


def from_previous_stage(self: ProcessGroupCommunicator, tensor: Tensor) -> Tensor:
    received = _receive(self, tensor)
    _hang(self, tensor.nbytes)
    return received


ProcessGroupCommunicator.tp_sum = tp_sum  # type: ignore[method-assign]
ProcessGroupCommunicator.from_previous_stage = from_previous_stage  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(main())
