"""Endpoints are written and read in one place; what is numeric stays as it is."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import pytest

from rlmesh.errors import LaunchError, UsageError
from rlmesh.runtime.transport import inet


@pytest.mark.parametrize(("text", "host", "port"), [
    ("node0", "node0", 1), ("node0:2", "node0", 2), ("10.0.0.1", "10.0.0.1", 1), ("10.0.0.1:2", "10.0.0.1", 2),
    ("::1", "::1", 1), ("[::1]", "::1", 1), ("[::1]:0", "::1", 0), ("tcp://[fd00::1]:2", "fd00::1", 2),
])  # fmt: skip
def test_endpoints_as_users_write_them(text: str, host: str, port: int) -> None:
    assert inet.parse_endpoint(text, 1) == (host, port)


@pytest.mark.parametrize("text", ["", ":1", "a:b", "a:1:2", "[::1", "::1]:2", "[[::1]]:2", "a:70000", "a:-1"])
def test_what_is_no_endpoint(text: str) -> None:
    with pytest.raises(UsageError, match="no host and port"):
        inet.parse_endpoint(text, 1)


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_brackets_come_once(host: str) -> None:
    joined = inet.join_host_port(host, 5)
    assert joined == "[::1]:5"
    assert inet.split_host_port(joined) == ("::1", 5)
    assert inet.join_host_port("a", "*") == "a:*"


def test_numeric_hosts_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **kwargs: object) -> object:
        raise AssertionError("looked up")

    monkeypatch.setattr(socket, "getaddrinfo", never)
    assert inet.resolve("127.0.0.2") == ("127.0.0.2",)
    assert inet.resolve("fe80::1%lo") == ("fe80::1%lo",)


def test_addresses_of_this_machine_are_local() -> None:
    assert inet.is_local("127.0.0.5")
    assert not inet.is_local("192.0.2.1")
    assert not inet.is_local("0.0.0.0")
    assert inet.local_route_to("127.0.0.2") == "127.0.0.1"
    assert inet.interface_of("127.0.0.2") == "lo"
    assert inet.interface_of("192.0.2.1") == ""


def test_the_interface_of_an_ipv6_address_is_found(tmp_path: Path) -> None:
    table = tmp_path / "if_inet6"
    table.write_text("fd000000000000000000000000000001 02 40 00 80     eth7\n")
    assert inet._interface_of_v6("fd00::1", table) == "eth7"
    assert inet._interface_of_v6("fd00::2", table) == ""


def test_only_an_address_of_this_machine_is_listened_on() -> None:
    assert inet.listening_address("127.0.0.2") == "127.0.0.2"
    with pytest.raises(LaunchError, match=r"192\.0\.2\.1 is no address of this machine"):
        inet.listening_address("192.0.2.1")


def test_a_name_that_means_loopback_here_means_something_else_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inet, "resolve", lambda host: ("127.0.1.1",))
    assert inet.listening_address("myhost") == "0.0.0.0"
    assert inet.listening_address("localhost") == "127.0.1.1"


def test_a_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    def gaierror(*args: object, **kwargs: object) -> object:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", gaierror)
    with pytest.raises(LaunchError, match=r"'nowhere\.invalid' does not resolve"):
        inet.listening_address("nowhere.invalid")
    (tried,) = inet.probe("nowhere.invalid", 7, 1.0)
    assert tried.code == socket.EAI_NONAME
    assert "does not resolve" in inet.tell_tried([tried])


def test_probing_says_which_address_and_errno() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (listens,) = inet.probe("127.0.0.1", port, 1.0)
    (refused,) = inet.probe("127.0.0.1", port, 1.0)
    assert (listens.code, refused.code) == (0, errno.ECONNREFUSED)
    assert inet.tell_tried([refused]) == f"127.0.0.1:{port}: Connection refused (errno {errno.ECONNREFUSED})"
