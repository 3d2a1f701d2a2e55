"""The signals that ask a service to end."""

from __future__ import annotations

import os
import signal

import pytest

from launcher_scripts.server.stopping import StopRequest


@pytest.mark.parametrize(
    ("nohup", "received"), [(signal.SIG_DFL, signal.SIGHUP), (signal.SIG_IGN, None)]
)
def test_nohup_outlives_its_terminal(
    nohup: signal.Handlers, received: signal.Signals | None
) -> None:
    before = signal.signal(signal.SIGHUP, nohup)
    try:
        request = StopRequest()
        with request.listening():
            os.kill(os.getpid(), signal.SIGHUP)
            assert request.received == received
        assert signal.getsignal(signal.SIGHUP) == nohup
    finally:
        signal.signal(signal.SIGHUP, before)
