"""Starts the ranks of a job on this machine, watches them, and says which one failed first; never imports torch.

Example:
    >>> import sys
    >>> node = {"devices": 2, "num_nodes": 1, "node_rank": 0, "address": "127.0.0.1", "port": 29500, "threads": 1}
    >>> ranks = [rank_environment({}, local_rank=n, **node) for n in range(2)]
    >>> supervise(spawn([sys.executable, "-c", "pass"]), ranks, stderr=sys.stderr)
    0
"""

from __future__ import annotations

from fairlead_launch.environment import rank_environment
from fairlead_launch.ports import PortError, bind_listener, free_port, inherited_listener
from fairlead_launch.processes import spawn
from fairlead_launch.reports import announce_run, send_report, watch_supervisor
from fairlead_launch.supervise import supervise

__all__ = [
    "PortError",
    "announce_run",
    "bind_listener",
    "free_port",
    "inherited_listener",
    "rank_environment",
    "send_report",
    "spawn",
    "supervise",
    "watch_supervisor",
]
