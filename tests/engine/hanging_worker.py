"""A rank that hangs at its 20th step, in the way the environment says, while its beat goes on."""

from __future__ import annotations

import os
import sys
import time

from torch import Tensor

from launcher_scripts.engine.communicator import ProcessGroupCommunicator
from launcher_scripts.engine.worker import main

WAY_VARIABLE = "TEST_HANGS_WHILE"
STEP = 20
_whole = ProcessGroupCommunicator.tp_sum


def tp_sum(self: ProcessGroupCommunicator, tensor: Tensor) -> Tensor:
    if self.progress.beat().step >= STEP:
        if os.environ[WAY_VARIABLE] == "computing":
            time.sleep(3600)
        with self.progress.exchange("all_reduce", tensor.nbytes):
            time.sleep(3600)
    return _whole(self, tensor)


ProcessGroupCommunicator.tp_sum = tp_sum  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(main())
