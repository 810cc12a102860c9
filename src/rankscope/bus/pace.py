"""When in a run scheduled work is due.

``RANKSCOPE_EAGER=1`` moves all of it into the first thirty steps, and canaries and reference steps
into the first four, so that tests meet late failures before users do. Numbers of steps that a
statistic needs, and timeouts, stay as they are.
"""

import os
from dataclasses import dataclass

VARIABLE = "RANKSCOPE_EAGER"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Steps and seconds, each explained where it is used."""

    lag: int = 16  # ``rankscope.bus.governor.LAG``
    first_kept: int = 16  # steps until the batches of a run's first canary are kept
    # steps that a training may be ahead of the root's judgement; None for any number
    lead: int | None = None
    governed_after: int = 300  # ``rankscope.bus.governor.ALWAYS``
    widest_interval: int = 1024  # ``rankscope.bus.governor.MAX_INTERVAL``
    governor_patience: int = 16  # observed steps between a decision and a narrower interval
    canary_spacing: int = 200  # steps between two canaries of findings, or of a schedule, at least
    canary_retry: int = 64  # steps until a canary that some worker missed is tried again
    canary_share: float = 0.002  # share of the training's time for canaries that nobody asked for
    # steps of a session whose gradient is computed again without a request
    references: tuple[int, ...] = ()
    state_in_turn: int = 32  # steps in which a part of the state is read
    state_spacing: int = 8  # ``rankscope.session.instruments.STATE_SPACING``
    later_look: int = 32  # step of a session in which the roles of parameters are read again
    look_every: int = 1024  # steps between two readings of the roles after it
    flags_every: int = 16  # steps between two readings of torch's global settings
    rolled_up: tuple[int, int] = (64, 512)  # ``rankscope.record.rollup_values.LEVELS``
    part_bytes: int = 16 * 2**20  # ``rankscope.record.writer.PART_BYTES``
    most_flush_seconds: float = float("inf")  # upper limit of ``flush_seconds``
    # interval between two searches for changed files, for an object store
    sent_seconds: float = 30.0


EAGER = Pace(
    lag=2,
    first_kept=1,
    lead=2,
    governed_after=12,
    widest_interval=2,
    governor_patience=4,
    canary_spacing=8,
    canary_retry=8,
    canary_share=1e6,
    references=(2, 3, 20),
    state_in_turn=8,
    state_spacing=2,
    later_look=3,
    look_every=16,
    flags_every=4,
    rolled_up=(8, 24),
    part_bytes=2**14,
    most_flush_seconds=0.0,
    sent_seconds=0.5,
)

PACE = EAGER if os.environ.get(VARIABLE, "0") not in ("", "0") else Pace()
"""The pace of this process; all ranks of a run have the same, see ``session/opening.py``."""
