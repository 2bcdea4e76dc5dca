"""The command of each node of `fairlead launch`, and with `--hosts` the start of all of them over ssh.

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
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final

from fairlead.errors import ConfigError, RunFailedError
from fairlead.hostlist import expand
from fairlead.secret_names import is_secret_name
from fairlead_launch.ports import DEFAULT_PORT
from fairlead_launch.settings import COMMAND_INTERVAL_S, OPTIONS, LaunchConfig

_SSH: Final = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5")
_PASSED: Final = re.compile(
    r"(FAIRLEAD|NCCL|GLOO|TORCH|PYTORCH|TORCHINDUCTOR|OMP|MKL|KMP|UCX|FI|OFI|HF|TRANSFORMERS|TOKENIZERS)_[A-Z_0-9]+"
    r"|PYTHON[A-Z]+|CUDA_(LAUNCH_BLOCKING|DEVICE_ORDER|DEVICE_MAX_CONNECTIONS)|WANDB_(MODE|PROJECT|ENTITY|DIR|RUN_GROUP)|TZ|LANG|LC_ALL"
)
_STARTED: Final = "fairlead-launch: the launcher of this host has started"
"""The first line on stderr, for whoever has started it."""
_GRACE_S: Final = 45.0
"""How long the launchers may take to end, when one could not be started."""
_SAVE_S: Final = 30.0
"""How long ranks may take to save and stop when who has started their launcher has gone."""
_OF_A_NODE: Final = ("nnodes", "node_rank", "master_addr", "master_port", "hosts", "hostfile", "ssh", "export")
"""The settings that say which node it is, or how it is started: all others are alike."""


def option_words(config: LaunchConfig) -> list[str]:
    """The options that all nodes have alike, where they are not the defaults."""
    defaults = {name: field.default for name, field in LaunchConfig.model_fields.items()}
    defaults["monitor_interval"] = COMMAND_INTERVAL_S
    return [
        word
        for name, (_, option, *_) in OPTIONS.items()
        if name not in _OF_A_NODE and (value := getattr(config, name)) != defaults[name]
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
    nnodes, count = str(config.nnodes), config.nodes[1]
    if hosts:
        count = len(hosts)
        nnodes = str(count) if config.nodes == (1, 1) else nnodes
        if int(nnodes.rpartition(":")[2]) != count:
            raise ConfigError(
                f"{count} host{'s'[: count != 1]} for {config.nnodes} nodes",
                where="--hosts",
                fix="name a host for each node",
            )
    address = config.master_addr
    if address == "127.0.0.1":
        address = hosts[0].rpartition("@")[2] if hosts else socket.gethostname()
    rendezvous = ["--main-address", address, "--main-port", str(config.master_port or DEFAULT_PORT)]
    rest = [*rendezvous, *option_words(config), *(["-m"] if config.module else []), *script]
    return [["launch", "--nnodes", nnodes, "--node-rank", str(rank), *rest] for rank in range(count)]


def node_commands(config: LaunchConfig, script: Sequence[str]) -> list[str]:
    """A line for each node, to be typed there, or here where the hosts are known."""
    hosts = hosts_of(config.hosts, config.hostfile)
    lines = [shlex.join(["fairlead", *words]) for words in node_words(config, script, hosts)]
    if not hosts:
        return lines
    there = [f"cd {shlex.quote(os.getcwd())} && {shlex.quote(sys.executable)} -m {line}" for line in lines]
    return [f"{config.ssh} {shlex.quote(host)} {shlex.quote(line)}" for host, line in zip(hosts, there, strict=True)]


def hosts_of(text: str | None, file: str | None) -> list[str]:
    """The hosts of `n1,n2` or `n[1-4]`, or of a file with one a line, `#` for comments; none where both are None.

    Raises:
        ConfigError: They cannot be read, or one is no host, or is there twice.

    Example:
        >>> hosts_of("n1,user@n2", None)
        ['n1', 'user@n2']
    """
    if text is None and file is None:
        return []
    where = f"--hosts {text}" if file is None else f"--hostfile {file}"
    try:
        if file is not None:
            lines = [line.partition("#")[0].strip() for line in Path(file).read_text().splitlines()]
            if wrong := next((line for line in lines if len(line.split()) > 1), None):
                fix = "write one host per line; set the number of processes with --nproc"
                raise ConfigError(f"{wrong!r} is more than a host", where=where, fix=fix)
            text = ",".join(filter(None, lines))
        hosts = expand(str(text))
    except OSError as error:
        raise ConfigError("the hosts cannot be read", where=where, why=str(error)) from error
    except ValueError as error:
        raise ConfigError(str(error), where=where, fix="write them as n1,n2 or n[1-4]") from error
    twice = sorted({host for host in hosts if hosts.count(host) > 1})
    if not hosts or twice or any(host.startswith("-") for host in hosts):
        what = f"{', '.join(twice)} is there more than once" if twice else "these are no hosts"
        raise ConfigError(what, where=where, fix="name each host once")
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


# -- where `fairlead launch --hosts` was typed


def launch_on_hosts(
    config: LaunchConfig, script: Sequence[str], environ: Mapping[str, str], received: list[int], stderr: IO[str]
) -> int:
    """Starts the launcher of each host over ssh, and waits for all; the exit code, which is the same on all.

    Raises:
        RunFailedError: One could not be started that the job needs: any, where `nnodes` is no range, else the first.
    """
    names = hosts_of(config.hosts, config.hostfile)
    commands = node_words(config, script, names)
    more = [name.strip() for name in config.export.split(",") if name.strip()]
    if absent := [name for name in more if name not in environ]:
        raise ConfigError(f"{', '.join(absent)}: not set here", where="--export", fix="export them first")
    variables = passed_variables(environ, more)
    needed = config.nodes[0] == config.nodes[1]
    hosts: list[_Host] = []
    lock = threading.Lock()
    try:
        for name, words in zip(names, commands, strict=True):
            order = {"cwd": os.getcwd(), "environ": variables, "words": words}
            hosts.append(_Host(name, config.ssh, environ, order, stderr, lock))
        _wait(hosts, received, needed, stderr)
    finally:
        for host in hosts:
            host.let_go()
        give_up_at = time.monotonic() + _GRACE_S
        for host in hosts:
            host.end(give_up_at)
    code = hosts[0].process.returncode
    return code if 0 <= code < 255 else 1


class _Host:
    """The launcher on a host, as the process that has started it sees it."""

    def __init__(
        self, name: str, ssh: str, environ: Mapping[str, str], order: object, stderr: IO[str], lock: threading.Lock
    ) -> None:
        path = ["env", f"PYTHONPATH={environ['PYTHONPATH']}"] if environ.get("PYTHONPATH") else []
        there = shlex.join([*path, sys.executable, "-m", "fairlead_launch.hosts"])
        self.name, self.ssh, self.started, self.reported = name, ssh, False, False
        self.command = [*shlex.split(ssh), *_SSH, name, there]
        self._lock = lock
        self._last = deque[str](maxlen=20)
        try:
            self.process = subprocess.Popen(
                self.command,
                env=dict(environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                process_group=0,  # Ctrl-C is for this process, which passes it on
            )
        except OSError as error:
            raise ConfigError(f"there is no {ssh!r}", where="--ssh", why=str(error)) from error
        streams = ((self.process.stdout, sys.stdout), (self.process.stderr, stderr))
        self._copiers = [threading.Thread(target=self._copy, args=one, daemon=True) for one in streams]
        for copier in self._copiers:
            copier.start()
        self.tell(json.dumps(order))

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

    def end(self, give_up_at: float) -> None:
        """Waits for its end; what still runs then ends by itself, as nothing holds its standard input any more."""
        try:
            self.process.wait(max(0.0, give_up_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.drain()

    def drain(self) -> None:
        """Waits for what it has printed."""
        for copier in self._copiers:
            copier.join(1.0)

    def not_started(self) -> RunFailedError:
        """Why there is no launcher."""
        reached = self.process.returncode != 255  # ssh's own
        silent = f"{self.ssh} exited with code {self.process.returncode}, without an error report"
        return RunFailedError(
            f"host {self.name} {'has no launcher' if reached else 'cannot be reached'}",
            where=shlex.join(self.command),
            why="\n".join(self._last) or silent,
            fix="Fairlead has to be installed there for this interpreter"
            if reached
            else f"try it by hand: {self.ssh} -o BatchMode=yes {self.name} true",
        )

    def _copy(self, stream: IO[str], own: IO[str]) -> None:
        for line in stream:
            text = line.rstrip("\n")
            if text == _STARTED:
                self.started = True
                continue
            self._last.append(text)
            if self.started:
                with self._lock:
                    own.write(f"{self.name}: {text}\n")
                    own.flush()


def _wait(hosts: Sequence[_Host], received: list[int], needed: bool, stderr: IO[str]) -> None:
    """Returns when all have ended; passes signals on."""
    signalled = 0
    while True:
        running = [host for host in hosts if host.process.poll() is None]
        while received:
            number = received.pop(0)
            # The first passes a signal on to the others; a second Ctrl-C goes to all.
            for host in running if signalled and number == signal.SIGINT else running[:1]:
                host.tell(str(int(number)))
            signalled += 1
        for host in hosts:
            if host in running or host.reported or host.started:
                continue
            host.reported = True
            host.drain()
            if not host.started:
                error = host.not_started()
                if needed or host is hosts[0]:
                    raise error
                print(f"launch      {error.block()}", file=stderr, flush=True)
        if not running:
            return
        time.sleep(0.05)


# -- on a host


def main() -> int:
    """What ssh starts: does what standard input says; a number there is a signal, its end a stop."""
    from fairlead.cli import main as fairlead

    order = json.loads(sys.stdin.readline())
    try:
        os.chdir(order["cwd"])
    except OSError as error:
        print(f"the working directory is not there: {error}", file=sys.stderr)
        return 2
    os.environ.update(order["environ"])
    print(_STARTED, file=sys.stderr, flush=True)
    threading.Thread(target=_obey, name="fairlead-remote", daemon=True).start()
    return fairlead(order["words"])


def _obey() -> None:
    for line in sys.stdin:
        os.kill(os.getpid(), int(line))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_SAVE_S)
    os._exit(1)  # and with it the ranks, which watch it


if __name__ == "__main__":
    sys.exit(main())
