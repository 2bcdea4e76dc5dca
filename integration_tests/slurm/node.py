"""PID 1 of a node: gives it its name and network, starts slurmd, and reaps what is left over.

`python -m integration_tests.slurm.node HOME NAME`, in the namespaces that the supervisor made for it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from integration_tests.slurm.plan import Plan
from integration_tests.slurm.system import become_reaper, die_with_parent, find, run, wait_until

__all__ = ["PLAN", "main"]

PLAN = "plan.json"


def main(home: Path, name: str) -> NoReturn:
    """Becomes the node, for as long as it lives."""
    plan = Plan.load(home / PLAN)
    if plan.isolation != "none":
        run("hostname", name)
        run("mount", "--make-rprivate", "/")
        run("mount", "--bind", f"{home}/hosts", "/etc/hosts")
        run("mount", "-t", "tmpfs", "-o", "mode=1777", f"shm-{name}", "/dev/shm")
    if plan.isolation == "network":
        _join_network(plan, name)
    os.environ["SLURM_CONF"] = str(plan.conf)
    os.environ["PATH"] = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/bin:/bin"
    become_reaper()  # where it is not PID 1
    before = die_with_parent if plan.isolation == "none" else None
    slurmd = subprocess.Popen([find("slurmd"), "-D", "-N", name], stdin=subprocess.DEVNULL, preexec_fn=before)
    (plan.sockets / f"{name}.slurmd").write_text(str(slurmd.pid))
    while True:
        try:
            os.wait()
        except ChildProcessError:
            if plan.isolation == "none":
                sys.exit(0)
            signal.pause()  # the node is up without its daemon, as a real one would be


def _join_network(plan: Plan, name: str) -> None:
    run("ip", "link", "set", "lo", "up")
    devices = Path("/proc/self/net/dev")
    wait_until("eth0", lambda: " eth0:" in " " + devices.read_text().replace("\n", " "), 10)
    run("ip", "addr", "add", f"{plan.nodes[name].address}/24", "dev", "eth0")
    run("ip", "link", "set", "eth0", "up")
    run("ip", "route", "add", "default", "via", plan.controller)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
