"""A real multi-node SLURM on one machine, for tests and by hand.

    python -m integration_tests.slurm.cluster up DIR [--nodes 4] [--gpus 2] ...
    eval "$(python -m integration_tests.slurm.cluster env DIR)"
    srun -N2 -n4 hostname
    python -m integration_tests.slurm.cluster exec DIR n1 ps aux
    python -m integration_tests.slurm.cluster fail DIR n2      (power off; `boot` powers on)
    python -m integration_tests.slurm.cluster down DIR

It needs slurmctld, slurmd, slurm-client, munge and iproute2 of Debian. As root each node has a hostname, PIDs, a
/dev/shm and a network of its own; another user gets nodes that differ in their names only. Nothing is written outside
DIR but a folder of sockets in /tmp, and network devices that go when the cluster does.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from integration_tests.slurm import supervisor
from integration_tests.slurm.node import PLAN
from integration_tests.slurm.plan import Options, Plan
from integration_tests.slurm.system import alive, find, run, started_at, wait_until

__all__ = ["Cluster", "main"]

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sinfo", "ip")
_PID = "supervisor.pid"


class Cluster:
    """A cluster in a folder.

    Args:
        home: The folder; its path may be long, and may hold what an earlier cluster has left.

    Example:
        >>> with Cluster(Path("/tmp/cluster")).up(Options(nodes=2)) as cluster:  # doctest: +SKIP
        ...     print(cluster.run("srun", "-N2", "hostname"))
    """

    def __init__(self, home: Path) -> None:
        self.home = home.resolve()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.down()

    @property
    def plan(self) -> Plan:
        """What it consists of.

        Raises:
            RuntimeError: It is not up.
        """
        if not self.is_up():
            raise RuntimeError(f"no cluster is up in {self.home}")
        return Plan.load(self.home / PLAN)

    def is_up(self) -> bool:
        """Whether its supervisor runs."""
        pid, born = self._supervisor()
        return pid is not None and alive(pid) and started_at(pid) == born

    def up(self, options: Options) -> Cluster:
        """Starts it, unless it is up, and waits until every node is idle.

        Raises:
            MissingProgramError: SLURM is not installed.
            RuntimeError: It did not come up; the message ends with its logs.
        """
        for program in _PROGRAMS:
            find(program)
        if self.is_up():
            return self
        self.down()
        for name in ("state", "log", "jobcomp"):
            shutil.rmtree(self.home / name, ignore_errors=True)
        self.home.mkdir(parents=True, exist_ok=True)
        plan = Plan.make(self.home, options)
        try:
            process = self._process = supervisor.start(plan)
            (self.home / _PID).write_text(f"{process.pid} {started_at(process.pid)}")
            wait_until("all nodes idle", lambda: self._idle(process) == len(plan.nodes), 20)
        except (RuntimeError, TimeoutError, OSError) as error:
            logs = "".join(f"--- {log.name}\n{_tail(log)}" for log in sorted((self.home / "log").iterdir()))
            self.down()
            raise RuntimeError(f"the cluster did not come up: {error}\n{logs}") from error
        return self

    def down(self) -> None:
        """Stops everything on it; logs and the jobs' files stay."""
        pid, _ = self._supervisor()
        if pid is not None and self.is_up():
            os.kill(pid, signal.SIGTERM)
            try:
                wait_until("down", lambda: not alive(pid), 10)
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)  # its children are killed with it
                wait_until("down", lambda: not alive(pid), 5)
        if self._process is not None:
            self._process.wait(10)
            self._process = None
        plan = self.home / PLAN
        if plan.exists():
            old = Plan.load(plan)
            if old.bridge is not None and Path("/sys/class/net", old.bridge).exists():
                run("ip", "link", "del", old.bridge, check=False)
            shutil.rmtree(old.sockets, ignore_errors=True)
        for name in (PLAN, _PID):
            (self.home / name).unlink(missing_ok=True)

    # -- use

    def environ(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """The variables for commands that are to reach it."""
        base = os.environ if base is None else base
        kept = {name: value for name, value in base.items() if not name.startswith(("SLURM_", "SBATCH_", "SRUN_"))}
        return {**kept, "SLURM_CONF": str(self.home / "slurm.conf")}

    def run(self, *command: str, cwd: Path | None = None, environ: Mapping[str, str] | None = None) -> str:
        """What a command prints.

        Raises:
            RuntimeError: It did not end with 0.
        """
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**self.environ(), **(environ or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def cancel_all(self) -> None:
        """Cancels every job, and waits until all nodes that are up are idle."""
        self.run("scancel", "--user", run("id", "-un").strip())
        busy = ("squeue", "-h", "-o", "%i")
        wait_until("no job is left", lambda: not self.run(*busy).strip(), 60)

    def on(self, node: str, *command: str, cwd: Path | None = None) -> list[str]:
        """The words that run a command on a node, as `ssh` would; `cwd` is where, None: here."""
        plan = self.plan
        if plan.isolation == "none":
            return list(command)
        init = (plan.sockets / f"{node}.init").read_text()
        network = ["-n"] if plan.isolation == "network" else []
        return ["nsenter", "-t", init, "-m", "-u", "-i", "-p", *network, f"--wd={cwd or Path.cwd()}", "--", *command]

    def fail(self, node: str) -> None:
        """Powers a node off."""
        self._tell("fail", node)

    def boot(self, node: str) -> None:
        """Powers a node on."""
        self._tell("boot", node)

    # -- how

    def _tell(self, what: str, node: str) -> None:
        plan = self.plan
        if node not in plan.nodes:
            raise ValueError(f"there is no node {node}; there are {', '.join(plan.nodes)}")
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(plan.sockets / "control.sock"))
            connection.sendall(f"{what} {node}".encode())
            answer = connection.recv(1000).decode()
        if answer != "ok":
            raise RuntimeError(answer)

    def _supervisor(self) -> tuple[int | None, str | None]:
        try:
            pid, born = (self.home / _PID).read_text().split()
        except OSError:
            return None, None
        return int(pid), born

    def _idle(self, process: subprocess.Popen[bytes]) -> int:
        if process.poll() is not None:
            raise RuntimeError("a daemon has ended")
        listed = subprocess.run(
            [find("sinfo"), "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N %T"],
            env=self.environ(),
            text=True,
            capture_output=True,
        )
        return sum(line.endswith(" idle") for line in listed.stdout.splitlines())


def _tail(log: Path, lines: int = 8) -> str:
    return "".join(line + "\n" for line in log.read_text(errors="replace").splitlines()[-lines:])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True)
    for what in ("up", "down", "env", "exec", "fail", "boot"):
        command = commands.add_parser(what)
        command.add_argument("home", type=Path)
        if what == "up":
            command.add_argument("--nodes", type=int, default=2)
            command.add_argument("--cpus", type=int, default=4, help="that each node claims to have")
            command.add_argument("--gpus", type=int, default=0, help="fake ones on each node")
            command.add_argument("--isolation", choices=["network", "hostname", "none"])
        elif what in ("exec", "fail", "boot"):
            command.add_argument("node")
        if what == "exec":
            command.add_argument("command", nargs=argparse.REMAINDER)
    chosen = parser.parse_args(arguments)
    cluster = Cluster(chosen.home)
    if chosen.what == "up":
        cluster.up(Options(chosen.nodes, chosen.cpus, chosen.gpus, chosen.isolation))
    elif chosen.what == "down":
        cluster.down()
    elif chosen.what == "exec":
        os.environ.update(cluster.environ())
        words = cluster.on(chosen.node, *chosen.command)
        os.execvp(words[0], words)
    elif chosen.what in ("fail", "boot"):
        getattr(cluster, chosen.what)(chosen.node)
    if chosen.what in ("up", "env"):
        print(f"export SLURM_CONF={cluster.plan.conf}\nexport PATH=$PATH:/usr/bin:/usr/sbin")
    return 0


if __name__ == "__main__":
    sys.exit(main())
