"""The two ends of a rank's socket: nothing is lost or waited for, strangers do no harm."""

import json
import os
import signal
import socket

import pytest

from rankscope.agent import link as link_module
from rankscope.agent import server
from rankscope.agent.frames import FrameKind, pack
from rankscope.agent.link import Link, LinkError, connect, listen
from rankscope.agent.rank_processes import ProgressMark
from rankscope.agent.server import LocalServer
from support.accidents import wait_until

SECRET = "password"


def check(frame):
    try:
        said = json.loads(frame.payload)
        return said["rank"] if said["secret"] == SECRET else None
    except (ValueError, KeyError, TypeError):
        return None


class Agent:
    """The reading half of an agent; it begins to read with ``start``."""

    def __init__(self):
        listening, self.address = listen()
        self.arrived, self.links = [], []
        self.server = LocalServer(
            listening, check, introduce=lambda *_: None, lives=lambda rank: True
        )

    def steps(self):
        self.arrived += self.server.take(0.05)
        return [each.frame.step for each in self.arrived if each.frame and each.frame.step >= 0]


@pytest.fixture
def agent():
    agent = Agent()
    yield agent
    for link in agent.links:
        link.close()
    if not agent.server._thread.ident:
        agent.server.start()
    agent.server.close(1.0)


def link_to(agent, rank=0):
    hello = pack(FrameKind.HELLO, json.dumps({"rank": rank, "secret": SECRET}).encode(), rank=rank)
    link = Link(lambda: connect(agent.address), hello)
    agent.links.append(link)
    return link


def send(link, *steps, size=1000):
    for step in steps:
        link.send(FrameKind.STEP, bytes(size), rank=0, step=step)


# The probe's end --------------------------------------------------------------------------------


def test_what_a_script_opens_in_place_of_the_connection_is_left_alone(agent):
    """A script may close all files that it does not know."""
    link = link_to(agent)
    mark = ProgressMark()
    numbers = link._socket.fileno(), mark.fileno()
    for number in numbers:
        os.close(number)
    opened = [os.open(os.devnull, os.O_RDWR) for _ in numbers]
    assert set(opened) == set(numbers)
    with pytest.raises(LinkError, match="closed in this process"):
        send(link, 0)
    link.close()
    mark.close()
    for number in opened:
        os.close(number)  # they are still ours


def test_a_broken_connection_is_no_signal(agent):
    """A script may have it end its process; and what the agent said before is heard first."""
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        link = link_to(agent)
        agent.server.start()
        wait_until(lambda: agent.server.ranks == (0,))
        agent.server.send(0, pack(FrameKind.OFF, b"why", rank=0))
        agent.server.close(5.0)
        send(link, 0, 1)
        assert not link.drain(5.0)
        assert [frame.payload for frame in link.poll()] == [b"why"]
        with pytest.raises(LinkError, match="has ended"):
            send(link, 2)
    finally:
        signal.signal(signal.SIGPIPE, before)


# The agent's end --------------------------------------------------------------------------------


def test_what_was_sent_before_a_connection_anew_is_read_first(agent):
    """As after Ctrl-C in the middle of a call of the system, while the agent is busy."""
    link = link_to(agent)
    link._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
    send(link, *range(60), size=100_000)  # more than is read at once, where the system has room
    link._connection = link_module._Connection.IN_CALL
    send(link, *range(60, 64), size=100_000)
    agent.server.start()
    while not link.drain(0.0):
        agent.steps()
    wait_until(lambda: set(agent.steps()) == set(range(64)))
    assert all(each.frame is not None for each in agent.arrived)


def test_who_does_not_know_the_secret_is_turned_away(agent, monkeypatch):
    monkeypatch.setattr(server, "STRANGER_SECONDS", 0.1)
    agent.server.start()
    wrong = json.dumps({"rank": 0, "secret": "guessed"}).encode()
    said = [
        b"GET / HTTP/1.1\r\n\r\n",
        pack(FrameKind.HELLO, wrong, rank=0),
        pack(FrameKind.STEP, b"", rank=0, step=7),
        pack(FrameKind.HELLO, b"[]", rank=0),
        b"",
    ]
    for words in said:
        stranger = connect(agent.address)
        stranger.sendall(words)
        stranger.settimeout(10.0)
        assert stranger.recv(1) == b""  # closed from the other side
        stranger.close()
    link = link_to(agent)
    send(link, 0)
    wait_until(lambda: agent.steps() == [0])
    assert agent.server.ranks == (0,)


def test_a_busy_agent_holds_no_more_than_it_may(agent, monkeypatch):
    """What it does not take stays with the ranks, which leave gradients out then."""
    monkeypatch.setattr(server, "MOST_HELD_BYTES", 1 << 20)
    agent.server.start()
    link = link_to(agent)
    send(link, *range(250), size=100_000)
    assert not link.drain(0.5)
    assert agent.server._held < 3 << 20
    assert not link.has_room
    while not link.drain(0.0):
        agent.steps()
    wait_until(lambda: agent.steps() == list(range(250)))
