"""Hosts and ports: parsing, formatting, resolving, and this machine's addresses that others can reach.

All of rlmesh parses and formats endpoints here, so that an IPv6 address has its brackets exactly once.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlmesh.errors import LaunchError, UsageError

__all__ = [
    "Tried", "family_of", "interface_of", "is_local", "join_host_port", "local_route_to", "parse_endpoint", "probe",
    "resolve", "split_host_port", "tell_tried",
]  # fmt: skip

_SIOCGIFADDR = 0x8915
ANY_ADDRESSES = ("0.0.0.0", "::")


def split_host_port(where: str) -> tuple[str, int]:
    """Split ``10.0.0.1:80`` or ``[::1]:80`` into host, without brackets, and port.

    Raises:
        UsageError: the text is neither.
    """
    host, colon, port = where.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    wrong = not bare or "[" in bare or "]" in bare or (":" in bare and not bracketed)
    if not colon or wrong or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise UsageError(f"{where!r} is no host and port, such as node0:29400, 10.0.0.1:29400 or [fd00::1]:29400")
    return bare, int(port)


def join_host_port(host: str, port: int | str) -> str:
    """The inverse of `split_host_port`; an IPv6 address may have its brackets already."""
    bare = host.removeprefix("[").removesuffix("]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def parse_endpoint(text: str, default_port: int) -> tuple[str, int]:
    """Host, without brackets, and port of a user's text such as ``node0``, ``node0:29400``, ``[::1]:0`` or ``::1``.

    Raises:
        UsageError: the text is not of this form.
    """
    text = text.strip().removeprefix("tcp://")
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        return str(ipaddress.ip_address(bare)), default_port
    except ValueError:
        pass
    if bare and ":" not in text and "[" not in text and "]" not in text:
        return text, default_port
    return split_host_port(text)


def is_numeric(host: str) -> bool:
    """True if the host is a numeric address, not a name."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def resolve(host: str) -> tuple[str, ...]:
    """The numeric addresses of a host, without duplicates, in the system's order.

    Raises:
        OSError: the name does not resolve (``socket.gaierror``).
    """
    if is_numeric(host):
        return (host,)
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(where[0]) for *_, where in found))


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def is_local(address: str) -> bool:
    """True if a numeric address belongs to this machine (to this network namespace)."""
    with socket.socket(family_of(address), socket.SOCK_DGRAM) as sock:
        try:
            sock.bind((address, 0))
        except OSError:
            return False
    return address not in ANY_ADDRESSES


def local_route_to(address: str, port: int = 9) -> str:
    """This machine's source address of packets to ``address``, at which that host can reach this machine.

    Sends nothing.

    Raises:
        OSError: there is no route.
    """
    with socket.socket(family_of(address), socket.SOCK_DGRAM) as sock:
        sock.connect((address, port))
        return str(sock.getsockname()[0])


def interface_of(address: str) -> str:
    """The name of the interface with a numeric address; empty if there is none."""
    if ":" in address:
        return _interface_of_v6(address)
    wanted = ipaddress.ip_address(address)
    if wanted.is_loopback:
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


def _interface_of_v6(address: str, table: Path = Path("/proc/net/if_inet6")) -> str:
    wanted = ipaddress.IPv6Address(address.partition("%")[0]).packed.hex()
    try:
        lines = table.read_text().splitlines()
    except OSError:
        return ""
    return next((line.split()[5] for line in lines if line.split()[0] == wanted), "")


@dataclass(frozen=True, slots=True)
class Tried:
    """The result of an attempt to connect: ``code`` is the errno, 0 if a process listens; ``text`` describes it."""

    where: str
    code: int
    text: str


def probe(host: str, port: int, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> tuple[Tried, ...]:
    """Try to connect to each address of a host, for ``timeout_s`` in all, and return the results."""
    deadline = clock() + timeout_s
    try:
        addresses = resolve(host)
    except OSError as error:
        return (Tried(join_host_port(host, port), error.errno or errno.EHOSTUNREACH, f"the name does not resolve: "
                      f"{error.strerror}"),)  # fmt: skip
    tried = []
    for number, address in enumerate(addresses):
        share_s = max(0.05, (deadline - clock()) / (len(addresses) - number))
        with socket.socket(family_of(address), socket.SOCK_STREAM) as sock:
            sock.settimeout(share_s)
            try:
                sock.connect((address, port))
                code = 0
            except TimeoutError:
                code = errno.ETIMEDOUT
            except OSError as error:
                code = error.errno or errno.EHOSTUNREACH
        text = os.strerror(code) if code else "a process listens there"
        tried.append(Tried(join_host_port(address, port), code, text))
    return tuple(tried)


def tell_tried(tried: Sequence[Tried]) -> str:
    """The tried addresses with their results, for an error's text."""
    return "; ".join(f"{each.where}: {each.text}" + (f" (errno {each.code})" if each.code else "") for each in tried)


def listening_address(host: str) -> str:
    """The address that a listener binds to so that others reach it as ``host``.

    A numeric address itself; for a name, its first address of this machine that is no loopback address, else the
    wildcard (a name that resolves to 127.0.1.1 here has another address elsewhere).

    Raises:
        LaunchError: a numeric address does not belong to this machine, or the name does not resolve.
    """
    if is_numeric(host):
        if host in ANY_ADDRESSES or is_local(host):
            return host
        raise LaunchError(
            f"{host} is no address of this machine, so it cannot listen there: node 0 must be the machine that the "
            "endpoint names (`ip -brief address` shows a machine's addresses)"
        )
    try:
        addresses = resolve(host)
    except OSError as error:
        raise LaunchError(
            f"the name {host!r} does not resolve on this machine ({error.strerror}): give a numeric address"
        ) from None
    here = [address for address in addresses if is_local(address)]
    outside = [address for address in here if not is_loopback(address)]
    if outside:
        return outside[0]
    if host == "localhost" and here:
        return here[0]
    return "0.0.0.0" if not here or any(":" not in address for address in addresses) else "::"
