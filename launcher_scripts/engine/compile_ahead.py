"""Compiles the kernels that a server will need first: `python -m ...engine.compile_ahead`.

Started by the first rank's process while that reads its weights. A process compiles one kernel
after the other, so several share them out; the rank finds them in Triton's cache. Nothing here
touches a GPU. Standard input holds the order, and standard output says how far things are.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

from launcher_scripts.engine.rank_processes import die_with_parent
from launcher_scripts.kernels.compiling import digest_compiler
from launcher_scripts.whole_files import write_whole

if TYPE_CHECKING:
    from launcher_scripts.engine.ahead import CompileOrder

NICENESS = 10  # the rank that reads its weights goes first
_TICKET = struct.Struct("=I")
_DONE = struct.Struct("=I?")

Task = Callable[[], None]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parent", type=int, required=True, help="process id of who started this")
    die_with_parent(parser.parse_args(argv).parent)
    os.nice(NICENESS)
    for number in (signal.SIGINT, signal.SIGTERM):  # the rank decides when this ends
        signal.signal(number, signal.SIG_IGN)
    started = time.monotonic()
    prepares = threading.Thread(target=digest_compiler)  # while torch is imported
    prepares.start()
    order = read_order()
    tasks, needed = foresee(order)
    prepares.join()
    failed = compile_all(tasks, needed, order.processes)
    if failed is None:
        return 1
    seconds = round(time.monotonic() - started, 1)
    summary = {"kernels": len(tasks), "failed": failed, "seconds": seconds}
    write_whole(order.marker, json.dumps(summary | {"processes": order.processes}))
    return 0


def read_order() -> CompileOrder:
    """Imports here: torch takes seconds."""
    from launcher_scripts.engine.ahead import CompileOrder
    from launcher_scripts.engine.messages import Decoder

    return Decoder(CompileOrder).decode(sys.stdin.buffer.read())


def compile_all(tasks: Sequence[Task], needed: Sequence[int], processes: int) -> int | None:
    """Run the tasks and say how far they are: how many failed, None where some were not run."""
    from launcher_scripts.engine.ahead import CompiledSoFar

    done: set[int] = set()
    failed, passes = 0, -1
    for number, fine in run_in_processes(tasks, processes):
        done.add(number)
        failed += not fine
        ready = passes_ready(needed, done)
        if ready != passes:
            passes = ready
            print(json.dumps(CompiledSoFar(len(tasks), len(done), passes)), flush=True)
    if len(done) == len(tasks):
        return failed
    print(f"{len(tasks) - len(done)} kernels were not compiled ahead", file=sys.stderr)
    return None


def foresee(order: CompileOrder) -> tuple[list[Task], list[int]]:
    """What there is to compile, in the order of need, and how much of it each pass needs: this one
    and those before it.
    """
    import torch

    from launcher_scripts.engine.idle_runner import first_passes, idle_runner, shortened
    from launcher_scripts.engine.loading import open_checkpoint
    from launcher_scripts.kernels.device_traits import DeviceTraits
    from launcher_scripts.kernels.foreseen import ForeseenKernels
    from launcher_scripts.kernels.idle_arithmetic import IdleArithmetic
    from launcher_scripts.kernels.idle_device import IdleDevice, can_make_launchers, work_on

    config = shortened(open_checkpoint(order.settings, verify=False).config)
    traits = DeviceTraits(order.capability, order.shared_bytes)
    device = IdleDevice(traits, launchers=can_make_launchers())
    work_on(device)
    kernels, needed = ForeseenKernels(), []
    silent = redirect_stdout(io.StringIO())  # the rank says by itself what is special about it
    with silent, torch.inference_mode(), IdleArithmetic(), kernels.noted():
        runner = idle_runner(order.settings, config)
        for plans in first_passes(runner, config):
            try:
                for plan in plans:
                    runner.execute(plan)
            except Exception as error:  # such a pass compiles what it needs itself
                complain(error)
            needed.append(1 + len(kernels))
    return [device.compile_interface, *(kernel.compile for kernel in kernels)], needed


def passes_ready(needed: Sequence[int], done: set[int]) -> int:
    """How many of the first passes have all that they need."""
    first = next((number for number in range(len(done) + 1) if number not in done), 0)
    return next((at for at, count in enumerate(needed) if count > first), len(needed))


def run_in_processes(tasks: Sequence[Task], processes: int) -> Iterator[tuple[int, bool]]:
    """Run the tasks in so many copies of this process, the first ones first.

    Yields each one's number, and whether it succeeded, as they end.
    """
    tickets, ticket_end = os.pipe()
    results, result_end = os.pipe()
    for number in range(len(tasks)):
        os.write(ticket_end, _TICKET.pack(number))
    os.close(ticket_end)
    parent = os.getpid()
    children = []
    for _ in range(processes):
        child = os.fork()
        if child == 0:
            die_with_parent(parent)
            _take_tickets(tasks, tickets, result_end)
        children.append(child)
    os.close(tickets)
    os.close(result_end)
    with os.fdopen(results, "rb") as stream:
        while record := stream.read(_DONE.size):
            yield _DONE.unpack(record)
    for child in children:
        os.waitpid(child, 0)


def _take_tickets(tasks: Sequence[Task], tickets: int, results: int) -> None:
    """Run tasks until none is left, and end this process."""
    while ticket := os.read(tickets, _TICKET.size):
        (number,) = _TICKET.unpack(ticket)
        fine = True
        try:
            tasks[number]()
        except OSError as error:  # another start may have more room
            complain(error)
            os._exit(1)
        except Exception as error:  # the rank meets it, too, if it ever needs the kernel
            fine = False
            complain(error)
        os.write(results, _DONE.pack(number, fine))
    os._exit(0)


def complain(error: Exception) -> None:
    print(f"compiling ahead: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
