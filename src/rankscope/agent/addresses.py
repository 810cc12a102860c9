"""Addresses at which the agents of other hosts may reach this one."""

import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915
_IF_INET6 = Path("/proc/net/if_inet6")
_GLOBAL = "00"  # the scope of an IPv6 address that is not bound to one network


def candidate_addresses(master: str | None = None) -> tuple[str, ...]:
    """Return this host's addresses, the most promising first.

    First comes ``master``, the address of the training's store (usually ``MASTER_ADDR``), if it
    belongs to this host; else the address from which this host reaches the store. Then come the
    addresses of all network interfaces, and last loopback: two "hosts" may be containers that
    share a network. IPv4 and IPv6, without repeats.
    """
    found = [] if master is None else _towards(master)
    found += [*_ipv4_of_interfaces(), *_ipv6_of_interfaces()]
    found.sort(key=lambda address: ipaddress.ip_address(address).is_loopback)
    return tuple(dict.fromkeys(found))


def tcp_endpoint(address: str, port: int) -> str:
    """Return the endpoint for a socket to connect to.

    Example:
        >>> tcp_endpoint("fd00::1", 5555)
        'tcp://[fd00::1]:5555'
    """
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def _towards(master: str) -> list[str]:
    try:
        infos = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return []
    own: list[str] = []
    routes: list[str] = []
    for family, kind, _, _, place in infos:
        address = str(place[0])
        if "%" in address or family not in (socket.AF_INET, socket.AF_INET6):
            continue
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing
            route = str(probe.getsockname()[0])
            (own if route == address else routes).append(route)
    return [*own, *routes]


def _ipv4_of_interfaces() -> list[str]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # no IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(answer[20:24]))
    return found


def _ipv6_of_interfaces() -> list[str]:
    found = []
    with contextlib.suppress(OSError):  # no IPv6, or not Linux
        for line in _IF_INET6.read_text().splitlines():
            digits, _, _, scope, *_ = line.split()
            if scope == _GLOBAL:
                found.append(str(ipaddress.IPv6Address(bytes.fromhex(digits))))
    return found
