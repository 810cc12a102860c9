"""What every rank was last seen doing, and from that: who holds up all others in a hang."""

import json
import time
from dataclasses import dataclass

STARTING, STOPPED = "starting", "stopped"


@dataclass(frozen=True, slots=True)
class Beat:
    """What a rank last wrote. Times are by that rank's own clock.

    Attributes:
        rank: The worker's rank.
        count: Number of the beat; a rank whose count stands still is dead or frozen.
        time: Unix time at which it was written.
        step: The training's step; −1 before the first.
        passes: How many phases of that step have begun; more with several micro-batches.
        phase: What the training does: starting, forward, backward, step, or stopped.
        since: Unix time at which that phase began.
    """

    rank: int
    count: int
    time: float
    step: int
    passes: int
    phase: str
    since: float

    @property
    def place(self) -> tuple[int, int]:
        """How far the rank is."""
        return self.step, self.passes

    def __str__(self) -> str:
        doing = {
            STARTING: "before its first step",
            STOPPED: f"not watched any more, after step {self.step}",
            "step": f"after the backward pass of step {self.step}",
        }.get(self.phase, f"in the {self.phase} pass of step {self.step}")
        return f"rank {self.rank}, {doing} since {_clock(self.since)}"

    def to_bytes(self) -> bytes:
        """Return the value for the store."""
        fields = [self.count, self.time, self.step, self.passes, self.phase, self.since]
        return json.dumps(fields).encode()

    @classmethod
    def from_bytes(cls, rank: int, value: bytes) -> "Beat":
        """Return what a rank wrote."""
        return cls(rank, *json.loads(value))


@dataclass(frozen=True, slots=True)
class HangReport:
    """What a rank whose step does not end found out about the others.

    Attributes:
        own: This rank's beat.
        seconds: For how long its step has not ended.
        behind: Ranks that are further back than others: these the others wait for.
        silent: Ranks that no longer write: dead, or on a frozen host.
        stopped: Ranks that have ended their watch before they came as far as the others.
        missing: Ranks that never wrote.
        recovered: Whether the step has ended after all.
    """

    own: Beat
    seconds: float
    behind: tuple[Beat, ...] = ()
    silent: tuple[Beat, ...] = ()
    stopped: tuple[Beat, ...] = ()
    missing: tuple[int, ...] = ()
    recovered: bool = False

    @property
    def suspects(self) -> tuple[int, ...]:
        """The ranks that the others wait for, as far as can be told, in order."""
        beats = (*self.behind, *self.silent, *self.stopped)
        return tuple(sorted({*(beat.rank for beat in beats), *self.missing}))

    def __str__(self) -> str:
        if self.recovered:
            return f"step {self.own.step} has ended after {self.seconds:.0f} s; training goes on"
        parts = [f"step {self.own.step} has not ended for {self.seconds:.0f} s"]
        if self.behind:
            parts.append(f"behind the others: {_listed(self.behind)}")
        if self.silent:
            parts.append(f"dead or frozen, without a sign of life: {_listed(self.silent)}")
        if self.stopped:
            parts.append(_listed(self.stopped))
        if self.missing:
            parts.append(f"never heard of: ranks {list(self.missing)}")
        if not self.suspects:
            parts.append(f"all ranks are as far as this one, {self.own}")
        return "; ".join(parts)


def compare_beats(
    own: Beat, seconds: float, earlier: dict[int, Beat], now: dict[int, Beat], num_workers: int
) -> HangReport:
    """Tell from two looks at all beats who holds up the others.

    Args:
        own: The beat of the rank that looks.
        seconds: For how long its step has not ended.
        earlier: Beats by rank, read so long before that each live rank has written since.
        now: Beats by rank.
        num_workers: How many ranks there should be.
    """
    counts = {rank: beat.count for rank, beat in earlier.items()}
    running = [beat for beat in now.values() if beat.phase != STOPPED]
    silent = [beat for beat in running if counts.get(beat.rank) == beat.count]
    alive = [beat for beat in running if beat not in silent]
    places = [beat.place for beat in (*alive, own)]
    first, last = min(places), max(places)
    return HangReport(
        own,
        seconds,
        behind=tuple(beat for beat in alive if beat.place == first != last),
        silent=tuple(silent),
        stopped=tuple(b for b in now.values() if b.phase == STOPPED and b.place < last),
        missing=tuple(rank for rank in range(num_workers) if rank not in now),
    )


def _listed(beats: tuple[Beat, ...]) -> str:
    shown = ", ".join(str(beat) for beat in beats[:8])
    return shown if len(beats) <= 8 else f"{shown}, and {len(beats) - 8} more"


def _clock(unix_time: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_time))
