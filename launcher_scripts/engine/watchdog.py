"""Which rank the others wait for in vain: told from what every rank says that it is doing.

Ranks of one tensor-parallel group do the same work at the same time, so one that has not reached
an exchange in which the others have waited for seconds is stuck. Pipeline stages rightly wait for
each other as long as any of them computes. A long prefill is therefore no failure: all compute.

On CUDA the host only launches, so a rank that waits is seen by its device, which does not finish a
step. Then the ranks that have not launched that step are to blame; where all have, those whose
devices have not finished it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher_scripts.engine.messages import Beat
from launcher_scripts.engine.progress import (
    ALONE_SECONDS,
    DEVICE,
    LOADING,
    OWN_WORK,
    WAITING,
    doing,
)
from launcher_scripts.parallel import Parallelism

# Seconds in vain, beside what ranks announce. Cores that have much else to do need the longer ones.
EXCHANGE_SECONDS = {"cpu": 4.0, "cuda": 3.0}
BEAT_AGE = 1.0  # what is known of a rank may be so many seconds old
SKEW = 3.0  # ranks with the same work take at most so many times as long as each other


@dataclass(frozen=True)
class Watchdog:
    """Judges the ranks of one engine; `patience` is in seconds."""

    parallelism: Parallelism
    patience: float

    def stuck(self, beats: Mapping[int, Beat], sent: int, since: float) -> dict[int, str]:
        """rank -> what it hangs in; empty while all is well.

        beats: the latest of every rank
        sent:  steps that rank 0 has sent out, the last of them `since` seconds ago
        """
        if any(beat.phase == LOADING for beat in beats.values()):
            return {}
        for find in (self._deaf, self._behind, self._unfinished, self._deadlocked):
            found = find(beats, sent, since)
            if found:
                return {rank: _words(beats[rank]) for rank in found}
        return {}

    def _deaf(self, beats: Mapping[int, Beat], sent: int, since: float) -> list[int]:
        """Ranks that do not begin the step they were sent."""
        return [
            rank
            for rank, beat in beats.items()
            if beat.phase == WAITING and beat.step < sent and min(beat.quiet, since) > self.patience
        ]

    def _behind(self, beats: Mapping[int, Beat], _sent: int, _since: float) -> list[int]:
        """Ranks that compute while their peers have long reached the next exchange."""
        found = []
        for rank, beat in beats.items():
            if beat.phase == DEVICE and not beat.held and beat.quiet > ALONE_SECONDS:
                found.append(rank)  # with what its device has given it
            if beat.phase not in OWN_WORK:
                continue
            ahead = [peer for peer in self._peers(rank, beats) if _is_ahead(peer, beat)]
            allowed = max([self.patience, *(SKEW * peer.stretch for peer in ahead)])
            others = [other for other in beats.values() if other.phase not in OWN_WORK]
            quiet = beat.quiet - beat.patience
            alone = self.patience + beat.alone
            if (ahead and quiet > allowed) or (others and quiet > alone):
                found.append(rank)
        return found

    def _unfinished(self, beats: Mapping[int, Beat], _sent: int, _since: float) -> list[int]:
        """Ranks that have not launched a step for which devices wait, or do not finish it."""
        overdue = [beat for beat in beats.values() if beat.held > self.patience + beat.allowed]
        if not overdue:
            return []
        step = min(beat.finished for beat in overdue) + 1
        absent = [rank for rank, beat in beats.items() if beat.launched < step]
        if absent:
            return [
                rank for rank in absent if beats[rank].quiet > self.patience + beats[rank].patience
            ]
        inside = [rank for rank, beat in beats.items() if beat.finished < step]
        return inside if all(beats[rank] in overdue for rank in inside) else []

    def _deadlocked(self, beats: Mapping[int, Beat], _sent: int, _since: float) -> list[int]:
        """Ranks in an exchange that does not end although nobody computes for it any more."""
        found = []
        for rank, beat in beats.items():
            idle = beat.phase in (WAITING, DEVICE, *OWN_WORK)
            awaited = any(o.phase in OWN_WORK and o.step <= beat.step for o in beats.values())
            if not idle and not awaited:
                found.append(rank)
        overdue = {rank: beats[rank].quiet - self.patience - beats[rank].patience for rank in found}
        if max(overdue.values(), default=0.0) <= 0:
            return []
        found = [rank for rank in found if overdue[rank] > -BEAT_AGE]
        least = [
            rank
            for rank in found
            if all(beats[rank].ticks <= peer.ticks for peer in self._peers(rank, beats))
        ]
        return least or found

    def _peers(self, rank: int, beats: Mapping[int, Beat]) -> Sequence[Beat]:
        """The other ranks that share this one's layers."""
        group = self.parallelism.tp_group(self.parallelism.pp_rank(rank))
        return [beats[peer] for peer in group if peer != rank and peer in beats]


def _is_ahead(peer: Beat, beat: Beat) -> bool:
    """Whether `peer` has been done with what `beat` computes."""
    finished = peer.phase == WAITING and peer.step >= beat.step
    return peer.ticks > beat.ticks or (finished and peer.step > 0)


def _words(beat: Beat) -> str:
    if beat.held > 0 and beat.phase in (WAITING, DEVICE):
        return f"hangs: its device has been at step {beat.finished + 1} for {beat.held:.0f} s"
    return f"hangs {doing(beat)}, for {beat.quiet:.0f} s"
