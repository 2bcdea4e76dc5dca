"""The exact command of each node, and the start of all of them over ssh from here."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Final

from fairlead.errors import ConfigError
from fairlead_launch.hosts import Hosts, hosts_of, passed_variables
from fairlead_launch.ports import DEFAULT_PORT
from fairlead_launch.settings import LaunchConfig

_SAME: Final = {
    "nproc_per_node": "--nproc",
    "backend": "--backend",
    "max_restarts": "--max-restarts",
    "monitor_interval": "--monitor-interval",
    "start_timeout": "--start-timeout",
    "log_dir": "--log-dir",
    "start_method": "--start-method",
    "tail": "--tail",
}
"""The options that all nodes have alike, by their fields."""


def option_words(config: LaunchConfig) -> list[str]:
    """The options that all nodes have alike, where they are not the defaults."""
    defaults = {name: LaunchConfig.model_fields[name].default for name in _SAME} | {"monitor_interval": 0.1}
    return [
        word
        for name, option in _SAME.items()
        if (value := getattr(config, name)) != defaults[name]
        for word in (option, f"{value:g}" if isinstance(value, float) else str(value))
    ]


def node_words(config: LaunchConfig, script: Sequence[str], hosts: Sequence[str] = ()) -> list[list[str]]:
    """What is behind `fairlead` on each node: of hosts, or of as many as `nnodes` says.

    Example:
        >>> config = LaunchConfig(nnodes=2, nproc_per_node=4, master_addr="n1", monitor_interval=0.1)
        >>> [" ".join(words) for words in node_words(config, ["train.py"])]  # doctest: +NORMALIZE_WHITESPACE
        ['launch --nnodes 2 --node-rank 0 --main-address n1 --main-port 29500 --nproc 4 train.py',
         'launch --nnodes 2 --node-rank 1 --main-address n1 --main-port 29500 --nproc 4 train.py']
    """
    same = option_words(config)
    port = config.master_port or DEFAULT_PORT
    nnodes, count = str(config.nnodes), config.nodes[1]
    if hosts:
        count = len(hosts)
        if config.nodes == (1, 1):
            nnodes = str(count)
        if int(nnodes.rpartition(":")[2]) != count:
            raise ConfigError(
                f"{count} host{'s'[: count != 1]} for {config.nnodes} nodes",
                where="--hosts",
                fix="name a host for each node",
            )
    if config.master_addr != "127.0.0.1":
        address = config.master_addr
    else:
        address = hosts[0].rpartition("@")[2] if hosts else socket.gethostname()
    places = ["--main-address", address, "--main-port", str(port), *same, *(["-m"] if config.module else []), *script]
    return [["launch", "--nnodes", nnodes, "--node-rank", str(rank), *places] for rank in range(count)]


def node_commands(config: LaunchConfig, script: Sequence[str]) -> list[str]:
    """A line for each node, to be typed there, or here where the hosts are known."""
    hosts = _hosts(config)
    lines = [shlex.join(["fairlead", *words]) for words in node_words(config, script, hosts)]
    if not hosts:
        return lines
    here = shlex.join(["cd", os.getcwd()])
    start = shlex.join([sys.executable, "-m"])
    remote = (f"{here} && {start} {line}" for line in lines)
    return [f"{config.ssh} {shlex.quote(host)} {shlex.quote(line)}" for host, line in zip(hosts, remote, strict=True)]


def launch_on_hosts(
    config: LaunchConfig, script: Sequence[str], environ: Mapping[str, str], received: list[int], stderr: IO[str]
) -> int:
    """Starts the launcher of each host over ssh; returns the exit code, which is the same on all."""
    hosts = _hosts(config)
    commands = dict(zip(hosts, node_words(config, script, hosts), strict=True))
    least, most = config.nodes
    more = [name.strip() for name in config.export.split(",") if name.strip()]
    if absent := [name for name in more if name not in environ]:
        raise ConfigError(f"{', '.join(absent)}: not set here", where="--export", fix="export them first")
    started = Hosts(
        commands,
        ssh=config.ssh,
        environ=environ,
        variables=passed_variables(environ, more),
        needed=least == most,
        stdout=sys.stdout,
        stderr=stderr,
    )
    return started.run(received)


def _hosts(config: LaunchConfig) -> list[str]:
    return hosts_of(config.hosts, config.hostfile) if config.hosts is not None or config.hostfile is not None else []
