"""Findings that several environments make."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Final

from fairlead import Finding, Resolution
from fairlead.findings import Severity

__all__ = ["LOOPBACK", "LOOPBACK_CODES", "is_loopback", "loopback_address"]

LOOPBACK: Final = "main-address-loopback"
LOOPBACK_CODES: Final = {
    LOOPBACK: "Several nodes are to meet at an address that means 'this machine' on each of them.",
}


def is_loopback(address: str) -> bool:
    """Whether an address means 'this machine' wherever it is used.

    Example:
        >>> is_loopback("localhost"), is_loopback("127.0.0.1"), is_loopback("n1")
        (True, True, False)
    """
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return address.lower() in {"localhost", "localhost.localdomain", "ip6-localhost"}


def loopback_address(resolution: Resolution, severity: Severity = "error") -> Iterator[Finding]:
    """Several nodes with a loopback main address: every node but the first would wait for itself."""
    address, nodes = resolution.topology.main_address, resolution.topology.num_nodes
    if address is None or nodes is None or nodes.value < 2 or not is_loopback(str(address.value)):
        return
    yield Finding(
        severity,
        LOOPBACK,
        f"the main address of {nodes.value} nodes is {address.value!r}, which is another machine on each of them",
        where=address.reason,
        why="the ranks of the other nodes would wait for a rank 0 on their own machine until the time-out",
        fix="set it to a name of the first node that the others reach, or unset it where a launcher knows it",
    )
