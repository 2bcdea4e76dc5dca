"""The parent of all processes of a cluster: munged, slurmctld and one process a node.

Every child dies with its parent, so that killing this one, however, takes the cluster down.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO

from integration_tests.slurm.node import PLAN
from integration_tests.slurm.plan import NAMESPACES, Plan
from integration_tests.slurm.system import (
    alive,
    become_reaper,
    descendants,
    die_with_parent,
    find,
    run,
    wait_until,
)

__all__ = ["Supervisor", "start"]

_ROOT = Path(__file__).parents[2]
_FOREIGN = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_")


class Supervisor:
    """Runs a cluster until it is told to stop.

    Args:
        plan: The cluster.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._log: IO[str] = (plan.home / "log" / "supervisor.log").open("a", buffering=1)

    def main(self, ready: int) -> None:
        """Serves `fail NODE` and `boot NODE` until SIGTERM, or until the watched process has gone.

        Args:
            ready: A file descriptor to write `ok` into once the daemons listen.
        """

        def leave(signum: int, frame: object) -> None:
            raise SystemExit

        signal.signal(signal.SIGTERM, leave)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        become_reaper()
        try:
            self._start()
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(str(self.plan.sockets / "control.sock"))
                server.listen()
                server.settimeout(0.5)
                os.write(ready, b"ok")
                os.close(ready)
                while self.plan.watch is None or alive(self.plan.watch):
                    self._look_after()
                    with contextlib.suppress(TimeoutError):
                        self._serve(server.accept()[0])
        except Exception as error:
            print("supervisor:", repr(error), getattr(error, "output", ""), file=self._log)
            raise
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._stop()

    # -- nodes

    def boot(self, name: str) -> None:
        """Powers a node on, unless it is."""
        running = self._processes.get(name)
        if running is not None and running.poll() is None:
            return
        plan = self.plan
        command = [sys.executable, "-m", "integration_tests.slurm.node", str(plan.home), name]
        if plan.isolation != "none":
            network = ["--net"] if plan.isolation == "network" else []
            command = [*NAMESPACES, "--ipc", "--kill-child=KILL", *network, *command]
        process = self._spawn(name, *command)
        init = process.pid
        if plan.isolation != "none":
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            wait_until(f"{name}: unshare", lambda: bool(children.read_text().split()), 10)
            init = int(children.read_text().split()[0])
        if plan.isolation == "network":
            assert plan.bridge is not None
            cable = f"{plan.bridge}-{name}"
            # The same card after a reboot, as of a real machine: others look for a former one for up to a minute.
            card = ":".join(["02", "00", *(f"{int(part):02x}" for part in plan.nodes[name].address.split("."))])
            peer = ("peer", "name", "eth0", "address", card, "netns", str(init))
            run("ip", "link", "add", cable, "type", "veth", *peer)
            run("ip", "link", "set", cable, "master", plan.bridge, "up")
        (plan.sockets / f"{name}.init").write_text(str(init))

    def fail(self, name: str) -> None:
        """Powers a node off: every process on it is killed."""
        process = self._processes.get(name)
        if process is None or process.poll() is not None:
            return
        if self.plan.isolation == "none":
            _kill(descendants(process.pid))
        process.kill()  # `--kill-child`: the node's PID 1 dies with it, and the kernel kills the rest
        process.wait()
        if self.plan.isolation == "network":  # the kernel would take its time
            run("ip", "link", "del", f"{self.plan.bridge}-{name}", check=False)

    # -- daemons

    def _spawn(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            preexec_fn=die_with_parent,
            start_new_session=True,
            cwd=_ROOT,
        )
        self._processes[name] = process
        return process

    def _start(self) -> None:
        plan = self.plan
        for name in [name for name in os.environ if name.startswith(_FOREIGN)]:
            del os.environ[name]  # a job inherits what its submitter has; daemons must not have it
        os.environ["SLURM_CONF"] = str(plan.conf)
        if plan.bridge is not None:
            run("ip", "link", "del", plan.bridge, check=False)
            run("ip", "link", "add", plan.bridge, "type", "bridge")
            run("ip", "addr", "add", f"{plan.controller}/24", "dev", plan.bridge)
            run("ip", "link", "set", plan.bridge, "up")
        self._spawn(
            "munged",
            *(find("munged"), "--foreground", "--force", f"--socket={plan.munge_socket}"),
            *(f"--key-file={plan.home}/munge.key", f"--log-file={plan.home}/log/munged.log"),
            *(f"--pid-file={plan.sockets}/munged.pid", f"--seed-file={plan.sockets}/munged.seed"),
        )
        wait_until("munged", plan.munge_socket.exists, 10)
        # Before the nodes: a slurmd that finds no controller tries again only seconds later.
        controller = self._spawn("slurmctld", find("slurmctld"), "-D")

        def listens() -> bool:
            if controller.poll() is not None:
                raise RuntimeError("slurmctld has ended; its log says why")
            with socket.socket() as probe:
                return probe.connect_ex((plan.controller, plan.port)) == 0

        wait_until("slurmctld", listens, 10)
        for name in plan.nodes:
            self.boot(name)

    def _look_after(self) -> None:
        for name in ("munged", "slurmctld"):
            code = self._processes[name].poll()
            if code is not None:
                raise RuntimeError(f"{name} has ended with {code}")
        ours = {process.pid for process in self._processes.values()}
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid in ours:
                    break  # whoever asks for it next reaps it
                os.waitpid(ended.si_pid, 0)

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                what, name = connection.recv(200).decode().split()
                {"fail": self.fail, "boot": self.boot}[what](name)
                connection.sendall(b"ok")
            except Exception as error:  # whatever it is, the asker is told
                connection.sendall(repr(error).encode())

    def _stop(self) -> None:
        controller = self._processes.get("slurmctld")
        if controller is not None:
            controller.terminate()  # it saves its state
            try:
                controller.wait(3)
            except subprocess.TimeoutExpired:
                controller.kill()
        for name in self.plan.nodes:
            self.fail(name)
        for process in self._processes.values():
            process.kill()
        _kill(descendants(os.getpid()))
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()
        if self.plan.bridge is not None:
            run("ip", "link", "del", self.plan.bridge, check=False)
        shutil.rmtree(self.plan.sockets, ignore_errors=True)


def start(plan: Plan) -> subprocess.Popen[bytes]:
    """Starts the supervisor of a cluster and waits until its daemons listen.

    Raises:
        RuntimeError: It gave up; the logs in the cluster's folder say why.
    """
    plan.save(PLAN)
    readable, ready = os.pipe()
    with (plan.home / "log" / "supervisor.log").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "integration_tests.slurm.supervisor", str(plan.home), str(ready)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(ready,),
            start_new_session=True,
            cwd=_ROOT,
        )
    os.close(ready)
    with open(readable, "rb") as answer:
        if answer.read(2) != b"ok":
            process.wait(10)
            raise RuntimeError("the supervisor gave up")
    return process


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    Supervisor(Plan.load(Path(sys.argv[1]) / PLAN)).main(int(sys.argv[2]))
