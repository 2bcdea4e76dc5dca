"""How `fairlead launch` starts a script, as a config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from fairlead.config_bases import ConfigModel
from fairlead_runs.waiting import parse_ranks

COMMAND_INTERVAL_S: Final = 0.1
"""The `monitor_interval` of the command."""
OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "nproc_per_node": ("N|auto|gpu", "--nproc", "--nproc-per-node"),
    "nnodes": ("N|MIN:MAX", "--nnodes"),
    "node_rank": ("R", "--node-rank"),
    "master_addr": ("HOST", "--main-address", "--master-addr"),
    "master_port": ("PORT", "--main-port", "--master-port"),
    "hosts": ("HOSTS", "--hosts"),
    "hostfile": ("FILE", "--hostfile"),
    "ssh": ("COMMAND", "--ssh"),
    "export": ("NAMES", "--export"),
    "backend": ("BACKEND", "--backend"),
    "max_restarts": ("N", "--max-restarts"),
    "monitor_interval": ("S", "--monitor-interval"),
    "start_timeout": ("S", "--start-timeout"),
    "log_dir": ("DIR", "--log-dir"),
    "start_method": ("fork-server|spawn", "--start-method"),
    "tail": ("RANKS", "--tail"),
}
"""What stands behind an option of `fairlead launch`, and its names, by the field; each also with underscores."""
_NODES: Final = re.compile(r"([1-9][0-9]*)(?::([1-9][0-9]*))?")


class LaunchConfig(ConfigModel):
    """How a script is started on N processes.

    Example:
        >>> LaunchConfig(nproc_per_node=4, max_restarts=0).nodes
        (1, 1)
    """

    nproc_per_node: PositiveInt | Literal["auto", "gpu"] = "auto"
    """Processes per node; gpu: one for each GPU; auto (default): the same, and one where there is none."""
    nnodes: PositiveInt | str = 1
    """Number of nodes (default 1); 2:4: at least two, at most four."""
    node_rank: NonNegativeInt = 0
    """Rank of this node, from 0; where the number of nodes is a range they agree themselves."""
    master_addr: str = "127.0.0.1"
    """Name or address of the first node."""
    master_port: int | None = Field(None, ge=1, le=65535)
    """Port of the rendezvous (default 29500; on one node the first free port from there). Of several nodes the
    launchers meet there, and the ranks on one behind it."""
    hosts: str | None = None
    """The nodes, as n1,n2 or n[1-4]: the launcher of each is started from here, over ssh."""
    hostfile: str | None = None
    """A file with the nodes, one host per line."""
    ssh: str = "ssh"
    """The command that connects to a host (default ssh); it must not ask for a password."""
    export: str = ""
    """Variables that the hosts get too, as NAME,NAME; NCCL_* and the like are passed anyway."""
    backend: str = "auto"
    """Backend for fairlead_distributed.init_process_group() in the script (default auto)."""
    max_restarts: NonNegativeInt = 3
    """How often all processes are restarted after a failure (default 3)."""
    monitor_interval: PositiveFloat = 1.0
    """Seconds between two checks of the processes (default 1; of the command 0.1)."""
    start_timeout: NonNegativeFloat = 600.0
    """Seconds for all processes to join the process group, after the first one (default 600)."""
    log_dir: str | None = None
    """Folder of the processes' logs, a file for each (default: logs, in the run directory if there is one)."""
    start_method: Literal["fork-server", "spawn"] = "fork-server"
    """fork-server (default): what is imported at the head of the script is imported once, and forked; spawn: each
    process imports for itself."""
    tail: str = "all"
    """Ranks whose output is shown: all (default), none, or as 0,4-7."""
    module: bool = False
    """SCRIPT is a module, as in `python -m`."""

    @field_validator("nnodes")
    @classmethod
    def _range(cls, value: int | str) -> int | str:
        if isinstance(value, str):
            match = _NODES.fullmatch(value)
            if match is None or (match[2] is not None and int(match[1]) > int(match[2])):
                raise ValueError(f"{value!r} is neither a number of nodes nor a range such as '2:4'")
        return value

    @field_validator("tail")
    @classmethod
    def _ranks(cls, value: str) -> str:
        if value not in ("all", "none"):
            parse_ranks(value)
        return value

    @model_validator(mode="after")
    def _rank_among_nodes(self) -> Self:
        least, most = self.nodes
        if least == most and self.node_rank >= most:
            raise ValueError(f"node_rank is {self.node_rank}, and there are {most} nodes, from 0")
        return self

    @property
    def placed(self) -> bool:
        """Checks that the rank among several nodes is given."""
        return bool({"nnodes", "node_rank", "master_addr"} & {n for n in self.model_fields_set if _differs(self, n)})

    @property
    def nodes(self) -> tuple[int, int]:
        """The least and the largest number of nodes."""
        least, _, most = str(self.nnodes).partition(":")
        return int(least), int(most or least)


def _differs(config: LaunchConfig, name: str) -> bool:
    return bool(getattr(config, name) != LaunchConfig.model_fields[name].default)
