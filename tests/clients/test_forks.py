"""Programs that a client of gRPC starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CLIENT = """
import importlib, subprocess, sys, threading
importlib.import_module(f"launcher_scripts.clients.{sys.argv[1]}")
from tritonclient import grpc

client = grpc.InferenceServerClient("127.0.0.1:1")

def ask():
    for _ in range(30):
        try:
            client.is_server_live()
        except grpc.InferenceServerException:
            pass

threads = [threading.Thread(target=ask) for _ in range(4)]
for thread in threads:
    thread.start()
for _ in range(40):
    subprocess.run(["true"], preexec_fn=lambda: None, check=True)
for thread in threads:
    thread.join()
"""


@pytest.mark.parametrize("first", ["connection", "async_connection"])
def test_grpc_does_nothing_in_a_child(checkout: Path, first: str) -> None:
    """Its handlers say something about threads, or end the child."""
    command = [sys.executable, "-W", "ignore", "-c", CLIENT, first]
    ended = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
