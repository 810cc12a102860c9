"""Lanes over a network that loses what is under way: each frame once, in order, or named."""

import random
from collections import deque

import pytest

from rankscope.agent.lane import CONFIRM_SECONDS, Lane, Note, Packet


class Network:
    """Two lanes, and a connection between them that can break.

    Attributes:
        delivered: What came out at each end.
    """

    def __init__(self, *lanes):
        self.lanes = lanes
        self.delivered = ([], [])
        self.now = 0.0
        self._under_way = (deque(), deque())
        self.cut = False
        self.num_packets = 0

    def turn(self, seconds=0.1, most=1000):
        """Let both ends send, then receive at most so many packets, of those that still arrive."""
        self.now += seconds
        for end, lane in enumerate(self.lanes):
            while (packet := lane.next(self.now)) is not None:
                self._under_way[1 - end].append((packet, lane.expected))
                lane.handed(packet, self.now)
                self.num_packets += 1
        for end, lane in enumerate(self.lanes):
            arriving = self._under_way[end]
            for _ in range(0 if self.cut else min(most, len(arriving))):
                payload = lane.take(*arriving.popleft(), self.now)
                if payload is not None:
                    self.delivered[end].append(payload)

    def lose(self):
        """Break the connection: what is under way is lost."""
        for arriving in self._under_way:
            arriving.clear()


def frames(count, start=0):
    return [b"%d" % number for number in range(start, start + count)]


def settle(network, seconds=10.0):
    for _ in range(int(seconds / 0.1)):
        network.turn()


def test_frames_arrive_and_are_forgotten():
    network = Network(Lane(), Lane())
    assert all(network.lanes[0].put(frame) for frame in frames(10))
    assert network.lanes[1].put(b"back")
    network.turn()
    assert network.delivered == (([b"back"]), frames(10))
    settle(network, 1.0)
    assert network.lanes[0].is_empty
    assert network.lanes[0].backlog_bytes == 0


def test_an_idle_lane_is_silent_unless_it_is_to_say_that_it_lives():
    quiet, living = Network(Lane(), Lane()), Network(Lane(asks_when_idle=True), Lane())
    settle(quiet, 10.0)
    settle(living, 10.0)
    assert quiet.num_packets == 0
    assert 18 <= living.num_packets <= 24  # a question a second, and its answer


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_lost_comes_again_once_and_in_order(seed):
    rng = random.Random(seed)
    lanes = Lane(window_bytes=700, asks_when_idle=True), Lane(window_bytes=700)
    network = Network(*lanes)
    sent = ([], [])
    for number in range(300):
        end = rng.randrange(2)
        payload = b"%d " % number + b"x" * rng.randrange(200)
        assert lanes[end].put(payload)
        sent[1 - end].append(payload)
        network.cut = rng.random() < 0.2
        network.turn(rng.random(), most=rng.randrange(8))
        if rng.random() < 0.1:
            network.lose()
    network.cut = False
    settle(network, 60.0)
    assert network.delivered == sent
    assert all(lane.is_empty for lane in lanes)


def test_what_was_lost_last_is_noticed_without_a_later_frame():
    network = Network(Lane(), Lane())
    for frame in frames(3):
        network.lanes[0].put(frame)
    network.cut = True
    network.turn()
    network.lose()
    network.cut = False
    settle(network, 3.0)
    assert network.delivered[1] == frames(3)


def test_no_more_is_under_way_than_the_window():
    lane = Lane(window_bytes=1000)
    for _ in range(100):
        lane.put(b"x" * 400)
    count = 0
    while (packet := lane.next(0.0)) is not None:
        lane.handed(packet, 0.0)
        count += 1
    assert count == 2


def test_a_frame_that_is_larger_than_the_window_goes_alone():
    network = Network(Lane(window_bytes=100), Lane())
    for _ in range(3):
        network.lanes[0].put(b"x" * 500)
    settle(network, 5.0)
    assert len(network.delivered[1]) == 3


def test_steps_that_found_no_room_are_named_in_order():
    network = Network(Lane(kept_bytes=1000), Lane())
    network.cut = True
    taken = {step for step in range(100) if network.lanes[0].put(b"x" * 100, step)}
    assert 0 < len(taken) < 20
    network.turn()
    network.lose()
    network.cut = False
    settle(network, 5.0)
    assert network.lanes[1].missing == [(len(taken), 99)]  # told although nothing follows
    assert network.lanes[0].is_empty
    assert network.lanes[0].put(b"", 100)
    settle(network, 1.0)
    assert len(network.delivered[1]) == len(taken) + 1


def test_a_step_of_which_a_small_frame_fits_and_a_large_one_does_not_is_named():
    lane = Lane(kept_bytes=1000)
    assert lane.put(b"x" * 600, 1)
    assert not lane.put(b"x" * 600, 2)
    assert lane.put(b"x", 2)
    network = Network(lane, Lane())
    network.turn()
    assert network.lanes[1].missing == [(2, 2)]
    assert len(network.delivered[1]) == 2


def test_an_answer_to_another_question_sends_nothing_again():
    lane = Lane()
    lane.put(b"a")
    lane.handed(lane.next(0.0), 0.0)
    lane.take(Packet(Note.ANSWER, 7), 0, 0.0)
    assert lane.next(0.0) is None


def test_confirmations_keep_each_other_company():
    receiver = Lane()
    for number in range(5):
        receiver.take(Packet(Note.DATA, number, b"x"), 0, 0.0)
    assert receiver.next(CONFIRM_SECONDS / 2) is None
    packet = receiver.next(CONFIRM_SECONDS)
    assert packet.note is Note.CONFIRM
    receiver.handed(packet, CONFIRM_SECONDS)
    assert receiver.next(9.0) is None
    assert receiver.expected == 5
