"""`fairlead launch --hosts`: the launcher of each node is started over ssh, and ends with this process.

What a host needs goes through ssh's standard input, never on a command line, which others can read: the folder, the
variables, the command. As long as that is open the launcher there runs; Ctrl-C travels through it too.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from fairlead.errors import ConfigError, RunFailedError
from fairlead.hostlist import expand
from fairlead.secret_names import is_secret_name
from fairlead_launch.remote import STARTED

_SSH: Final = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5")
_PASSED: Final = re.compile(
    r"(FAIRLEAD|NCCL|GLOO|TORCH|PYTORCH|TORCHINDUCTOR|OMP|MKL|KMP|UCX|FI|OFI|HF|TRANSFORMERS|TOKENIZERS)_[A-Z_0-9]+"
    r"|PYTHON[A-Z]+|CUDA_(LAUNCH_BLOCKING|DEVICE_ORDER|DEVICE_MAX_CONNECTIONS)|WANDB_(MODE|PROJECT|ENTITY|DIR|RUN_GROUP)|TZ|LANG|LC_ALL"
)
_GRACE_S: Final = 45.0
"""How long the launchers may take to end, when one could not be started."""


def hosts_of(text: str | None, file: str | None) -> list[str]:
    """The hosts of `n1,n2` or `n[1-4]`, or of a file with one a line, `#` for comments; ConfigError: there are none.

    Example:
        >>> hosts_of("n1,user@n2", None)
        ['n1', 'user@n2']
    """
    if file is not None:
        try:
            lines = [line.partition("#")[0].strip() for line in Path(file).read_text().splitlines()]
        except OSError as error:
            raise ConfigError("the hosts cannot be read", where=f"--hostfile {file}", why=str(error)) from error
        text = ",".join(filter(None, lines))
        if wrong := next((line for line in lines if len(line.split()) > 1), None):
            raise ConfigError(
                f"{wrong!r} is more than a host",
                where=f"--hostfile {file}",
                fix="write one host per line; set the number of processes with --nproc",
            )
    assert text is not None
    try:
        hosts = expand(text)
    except ValueError as error:
        raise ConfigError(str(error), where=f"--hosts {text}", fix="write them as n1,n2 or n[1-4]") from error
    twice = sorted({host for host in hosts if hosts.count(host) > 1})
    if not hosts or twice or any(host.startswith("-") for host in hosts):
        what = f"{', '.join(twice)} is there more than once" if twice else "these are no hosts"
        raise ConfigError(what, where=f"--hosts {text}", fix="name each host once")
    return hosts


def passed_variables(environ: Mapping[str, str], more: Sequence[str] = ()) -> dict[str, str]:
    """The variables that the launchers on other hosts get: those of libraries, and `more` by name; no secret unasked.

    Example:
        >>> here = {"TOKENIZERS_PARALLELISM": "false", "HF_TOKEN": "x", "HOME": "/root", "MINE": "1"}
        >>> passed_variables(here, ["MINE"])
        {'TOKENIZERS_PARALLELISM': 'false', 'MINE': '1'}
    """
    own = {name for name in environ if _PASSED.fullmatch(name) and not is_secret_name(name)}
    return {name: value for name, value in environ.items() if name in own or name in more}


@dataclass
class Host:
    """The launcher on a host, as this process sees it."""

    name: str
    process: subprocess.Popen[str]
    started: bool = False
    last: deque[str] = field(default_factory=lambda: deque[str](maxlen=20))
    copiers: list[threading.Thread] = field(default_factory=list)

    def tell(self, text: str) -> None:
        """Sends a line to it; nothing where it has gone."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(text + "\n")
            self.process.stdin.flush()

    def let_go(self) -> None:
        """Has its launcher stop."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()


def ssh_command(ssh: str, host: str, environ: Mapping[str, str]) -> list[str]:
    """What starts `fairlead_launch.remote` on a host, with this interpreter."""
    path = ["env", f"PYTHONPATH={environ['PYTHONPATH']}"] if environ.get("PYTHONPATH") else []
    return [*shlex.split(ssh), *_SSH, host, shlex.join([*path, sys.executable, "-m", "fairlead_launch.remote"])]


class Hosts:
    """The launchers of a job, one on each host.

    Args:
        commands: For each host, the words behind `fairlead`.
        ssh: The command that reaches a host.
        environ: This process's variables.
        variables: The variables that the launchers get.
        needed: All hosts are: where one cannot be reached, nothing runs. Else the job may do without all but the first.
    """

    def __init__(
        self,
        commands: Mapping[str, Sequence[str]],
        *,
        ssh: str,
        environ: Mapping[str, str],
        variables: Mapping[str, str],
        needed: bool,
        stdout: IO[str],
        stderr: IO[str],
    ) -> None:
        self._commands, self._ssh, self._needed = commands, ssh, needed
        self._environ, self._variables = dict(environ), dict(variables)
        self._stdout, self._stderr = stdout, stderr
        self._lock = threading.Lock()
        self._hosts: list[Host] = []

    def run(self, received: list[int]) -> int:
        """Starts them and waits for all; the exit code of the first. `RunFailedError`: one could not be started."""
        try:
            for name, words in self._commands.items():
                self._hosts.append(self._start(name, words))
            self._wait(received)
        finally:
            for host in self._hosts:
                host.let_go()
            give_up_at = time.monotonic() + _GRACE_S
            for host in self._hosts:
                try:
                    host.process.wait(max(0.0, give_up_at - time.monotonic()))
                except subprocess.TimeoutExpired:
                    host.process.kill()  # its launcher ends by itself: nothing holds its standard input any more
                    host.process.wait()
                for copier in host.copiers:
                    copier.join(1.0)
        code = self._hosts[0].process.returncode
        return code if 0 <= code < 255 else 1

    def _start(self, name: str, words: Sequence[str]) -> Host:
        try:
            process = subprocess.Popen(
                ssh_command(self._ssh, name, self._environ),
                env=self._environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                process_group=0,  # Ctrl-C is for this process, which passes it on
            )
        except OSError as error:
            raise ConfigError(f"there is no {self._ssh!r}", where="--ssh", why=str(error)) from error
        host = Host(name, process)
        for stream, own in ((process.stdout, self._stdout), (process.stderr, self._stderr)):
            copier = threading.Thread(target=self._copy, args=(host, stream, own), daemon=True)
            copier.start()
            host.copiers.append(copier)
        host.tell(json.dumps({"cwd": os.getcwd(), "environ": self._variables, "words": list(words)}))
        return host

    def _copy(self, host: Host, stream: IO[str], own: IO[str]) -> None:
        for line in stream:
            if line.rstrip("\n") == STARTED:
                host.started = True
                continue
            host.last.append(line.rstrip("\n"))
            if host.started:
                with self._lock:
                    own.write(f"{host.name}: {line.rstrip(chr(10))}\n")
                    own.flush()

    def _wait(self, received: list[int]) -> None:
        signalled, failed = 0, set[str]()
        while True:
            running = [host for host in self._hosts if host.process.poll() is None]
            while received:
                number = received.pop(0)
                # The first tells the others, once; who asks again means all.
                for host in running if signalled and number == signal.SIGINT else running[:1]:
                    host.tell(str(int(number)))
                signalled += 1
            for host in self._hosts:
                if host not in running and not host.started and host.name not in failed:
                    failed.add(host.name)
                    for copier in host.copiers:
                        copier.join(1.0)
                    if not host.started:
                        self._not_started(host)
            if not running:
                return
            time.sleep(0.05)

    def _not_started(self, host: Host) -> None:
        reached = host.process.returncode != 255  # ssh's own
        error = RunFailedError(
            f"host {host.name} {'has no launcher' if reached else 'cannot be reached'}",
            where=shlex.join(ssh_command(self._ssh, host.name, {})),
            why="\n".join(host.last)
            or f"{self._ssh} exited with code {host.process.returncode}, without an error report",
            fix="Fairlead has to be installed there for this interpreter"
            if reached
            else f"try it by hand: {self._ssh} -o BatchMode=yes {host.name} true",
        )
        if self._needed or host is self._hosts[0]:
            raise error
        print(f"launch      {error.block()}", file=self._stderr, flush=True)
