"""How `fairlead launch` starts a script, as a config."""

from __future__ import annotations

import re
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

_NODES: Final = re.compile(r"([1-9][0-9]*)(?::([1-9][0-9]*))?")


class LaunchConfig(ConfigModel):
    """How a script is started on N processes.

    Example:
        >>> LaunchConfig(nproc_per_node=4, max_restarts=0).nodes
        (1, 1)
    """

    nproc_per_node: PositiveInt | Literal["auto", "gpu"] = "auto"
    """Processes on each node; `gpu`: one for each GPU, `auto`: the same, and one where there is none."""
    nnodes: PositiveInt | str = 1
    """Nodes; `"2:4"`: at least two, at most four."""
    node_rank: NonNegativeInt = 0
    """Which node this is, from 0; where `nnodes` is a range the nodes agree themselves."""
    master_addr: str = "127.0.0.1"
    """The name or address of the first node."""
    master_port: int | None = Field(None, ge=1, le=65535)
    """The port on which the ranks meet; None: on one node the first that is free from 29500 on, else 29500. Of several
    nodes the launchers meet there, and the ranks on one behind it."""
    hosts: str | None = None
    """The nodes, as `n1,n2` or `n[1-4]`: the launcher of each is started over ssh."""
    hostfile: str | None = None
    """The same from a file, a host a line."""
    ssh: str = "ssh"
    """The command that reaches a host; it must not ask for a password."""
    export: str = ""
    """Variables that the launchers on the hosts get, beside those of known libraries, as `NAME,NAME`."""
    backend: str = "auto"
    """The backend of `fairlead_distributed.init_process_group()` in the script: `nccl`, `gloo`, `auto`."""
    max_restarts: NonNegativeInt = 3
    """How often all processes are started again after one has failed."""
    monitor_interval: PositiveFloat = 1.0
    """Seconds between two looks at the processes."""
    start_timeout: NonNegativeFloat = 600.0
    """Seconds that processes may take to come to the process group, once the first one waits there."""
    log_dir: str | None = None
    """The folder of the logs, a file for each rank; None: `logs` in the run directory where there is one, else here."""
    start_method: Literal["fork-server", "spawn"] = "fork-server"
    """Processes are forked from one that has done the imports at the head of the script, or do theirs each."""
    tail: str = "all"
    """The ranks whose lines are shown: `all`, `none`, or as `0,4-7`."""
    module: bool = False
    """The script is a module's name, as behind `python -m`."""

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
        """Whether it is said which of several nodes this is."""
        return bool({"nnodes", "node_rank", "master_addr"} & {n for n in self.model_fields_set if _differs(self, n)})

    @property
    def nodes(self) -> tuple[int, int]:
        """The least and the largest number of nodes."""
        least, _, most = str(self.nnodes).partition(":")
        return int(least), int(most or least)


def _differs(config: LaunchConfig, name: str) -> bool:
    return bool(getattr(config, name) != LaunchConfig.model_fields[name].default)
