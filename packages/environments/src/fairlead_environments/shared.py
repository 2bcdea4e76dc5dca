"""What several environments share: their runtime, config fields, and the check of a main address. Torch-free."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from fairlead import EnvironmentConfigBase, EnvironmentPlugin, Finding, Resolution, hookimpl
from fairlead.engines import LIGHTNING
from fairlead.findings import Severity

Port = Annotated[int, Field(ge=1, le=65535)]
"""A TCP port."""


class MainAddressConfig(EnvironmentConfigBase):
    """An environment whose meeting point can be set by hand."""

    main_address: Annotated[str, Field(min_length=1)] | None = None
    """Host name or address of the node with rank 0, as the other nodes reach it; None asks the launcher."""
    main_port: Port | None = None
    """TCP port on that node; None takes MASTER_PORT if it is exported, else one that fits the environment."""


class ResolvedRanks(EnvironmentPlugin):
    """An environment whose ranks are all known from the resolution, so that one runtime serves it."""

    engines = LIGHTNING


class LaunchedEnvironment(ResolvedRanks):
    """An environment that may start ranks on several nodes: its main address must not mean 'this machine'."""

    codes: ClassVar[Mapping[str, str]] = {
        "main-address-loopback": "Several nodes are to meet at an address that means 'this machine' on each of them.",
    }
    loopback: ClassVar[Severity] = "error"
    """How bad a loopback address is: a warning where people test with two 'nodes' on one machine."""

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
        """A loopback main address, often a MASTER_ADDR exported for another job: nodes would wait for themselves."""
        address, nodes = resolution.topology.main_address, resolution.topology.num_nodes
        if address is None or nodes is None or nodes.value < 2 or not is_loopback(str(address.value)):
            return
        yield Finding(
            self.loopback,
            "main-address-loopback",
            f"the main address of {nodes.value} nodes is {address.value!r}, which is another machine on each of them",
            where=address.reason,
            why="the ranks of the other nodes would wait for a rank 0 on their own machine until the time-out",
            fix="set it to a name of the first node that the others reach, or unset it where a launcher knows it",
        )


def is_loopback(address: str) -> bool:
    """Whether an address means 'this machine' wherever it is used."""
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return address.lower() in {"localhost", "localhost.localdomain", "ip6-localhost"}
