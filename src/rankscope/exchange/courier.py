"""The background thread that gathers steps, one at a time and in order, while training goes on."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from rankscope.exchange.channel import ChannelError
from rankscope.exchange.gathering import Gathering, Outcome
from rankscope.exchange.payload import Goodbye, PayloadError, WorkerStep

_IDLE_SECONDS = 1.0
_MOST_WAITING = 1024
_OWN_WORK_SECONDS = 10.0
_LOOK_SECONDS = 0.05
_MOST_PUT_OFF_SECONDS = 1.0
_GIVE_WAY_SECONDS = 5e-5  # the shortest sleep in which a thread that waits for the lock gets it


class Courier:
    """Sends this worker's steps and delivers everybody's.

    The training thread only puts an item on a queue. What follows needs the interpreter's lock for
    milliseconds, and so does the training while it launches operations. So the courier waits for
    its turn (:meth:`take_turn`) and lets go of the lock every so often (:meth:`give_way`); neither
    when a further step is waiting already.

    Steps are gathered in order on every worker; whether a message has room for a gradient depends
    on the step's number and on steps that all workers have gathered before, so the workers always
    agree on its size. A worker that leaves says so in the message after its last step, so that
    nobody waits for it.

    Args:
        gathering: Exchanges a step with the other workers.
        interval_at: Returns the sampling interval of a step: gradients travel with multiples of
            it. Its answers may depend on nothing but the step and what was delivered before it.
        deliver: Called in this thread with what came of every step.
        idle: Called in this thread at least every few seconds.
        ended: Called in this thread when the channel ends other than by :meth:`leave`.
        first_step: Number of the first step.
    """

    def __init__(
        self,
        gathering: Gathering,
        *,
        interval_at: Callable[[int], int],
        deliver: Callable[[Outcome], None],
        idle: Callable[[], None],
        ended: Callable[[BaseException], None],
        first_step: int = 0,
    ) -> None:
        self._gathering = gathering
        self._interval_at = interval_at
        self._deliver = deliver
        self._idle = idle
        self._ended = ended
        self._queue: queue.Queue[Callable[[], WorkerStep] | None] = queue.Queue(_MOST_WAITING)
        self._num_sent = self._num_delivered = 0
        self._turn = threading.Event()
        self._leaving = threading.Event()
        self._ended_well = False
        self._next_step = first_step
        self._stage = 1  # odd while this worker works, even while it waits for the others
        self._thread = threading.Thread(target=self._run, name="rankscope", daemon=True)
        self._thread.start()

    def send(self, prepare: Callable[[], WorkerStep]) -> None:
        """Queue this worker's next step; returns at once.

        Args:
            prepare: Called in the courier's thread; may wait for the device.

        Raises:
            ChannelError: So many steps wait that this worker or a peer must be stuck.
        """
        if self._num_sent == self._num_delivered:
            self._turn.clear()
        else:
            self._turn.set()
        self._num_sent += 1
        try:
            self._queue.put_nowait(prepare)
        except queue.Full:
            busy = "this worker's monitor is" if self._stage % 2 else "the monitor of another is"
            raise ChannelError(
                f"{self._queue.maxsize} steps wait to be gathered: {busy} stuck, or too slow"
            ) from None

    def take_turn(self) -> None:
        """Say that the training is about to wait itself, and needs the interpreter's lock less."""
        self._turn.set()

    def give_way(self) -> None:
        """Let the training have the interpreter's lock, if it waits for it.

        In the courier's thread, now and then while it delivers a step.
        """
        if not self._is_behind:
            time.sleep(_GIVE_WAY_SECONDS)

    def leave(self) -> None:
        """Announce that no more steps follow; returns at once."""
        if not self._leaving.is_set():
            self._leaving.set()
            self._turn.set()
            with contextlib.suppress(queue.Full):  # then the thread looks when the queue is empty
                self._queue.put_nowait(None)

    def join(self, timeout: float) -> bool:
        """Wait until all queued steps are delivered, as long as that gets on.

        Args:
            timeout: Seconds to wait for another worker's message. What this worker itself does
                with a step may take ten seconds: on a busy machine it is late, not lost.

        Returns:
            Whether they are delivered, or the channel has ended and that was told.
        """
        stage, since = self._stage, time.monotonic()
        while self._thread.is_alive():
            if self._stage > stage:
                stage, since = self._stage, time.monotonic()
            patience = max(timeout, _OWN_WORK_SECONDS) if stage % 2 else timeout
            left = since + patience - time.monotonic()
            if left <= 0:
                return False
            self._thread.join(min(left, _LOOK_SECONDS))
        return self._ended_well

    @property
    def is_current(self) -> bool:
        """Whether the caller is in the courier's thread."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        try:
            while self._deliver_next():
                pass
            self._say_goodbye()
        except (Goodbye, ChannelError, PayloadError) as error:
            self._ended(error)
        except BaseException as error:  # sys.exit() would end this thread, and tell nobody
            try:
                self._ended(error)
            finally:
                self._say_goodbye()
        self._ended_well = True

    def _deliver_next(self) -> bool:
        """Deliver a step, if one comes soon; return whether others may follow."""
        try:
            prepare = self._queue.get(timeout=_IDLE_SECONDS)
        except queue.Empty:
            if self._leaving.is_set():
                return False
            self._idle()
            return True
        if prepare is None:
            return False
        if not self._is_behind:
            self._turn.wait(_MOST_PUT_OFF_SECONDS)
        message = prepare()
        self.give_way()
        outcome = self._exchange(message)
        self._next_step = outcome.step + 1
        self.give_way()
        self._deliver(outcome)
        self._num_delivered += 1
        self._idle()
        return True

    @property
    def _is_behind(self) -> bool:
        """Whether more waits than the step in hand."""
        return self._num_sent - self._num_delivered > 1 or self._leaving.is_set()

    def _say_goodbye(self) -> None:
        """Release the others from waiting for us; whatever they answer, this is the end."""
        with contextlib.suppress(Exception):
            self._exchange(WorkerStep(self._next_step, leaving=True))

    def _exchange(self, message: WorkerStep) -> Outcome:
        self._stage += 1
        try:
            return self._gathering.exchange(message, self._interval_at(message.step))
        finally:
            self._stage += 1
