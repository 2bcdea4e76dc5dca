"""Launchers started over ssh: a real sshd on this machine, under two names."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fairlead.errors import ConfigError
from fairlead_launch.hosts import hosts_of
from fairlead_launch.ports import free_port

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
SCRIPT = """
import os, pathlib, time
rank = os.environ["RANK"]
pathlib.Path(f"pid-{rank}").write_text(str(os.getpid()))
print(rank, os.environ["WORLD_SIZE"], os.environ.get("NCCL_DEBUG"), os.environ.get("MINE"), flush=True)
while not pathlib.Path("finish").exists():
    time.sleep(0.05)
"""
needs_sshd = pytest.mark.skipif(
    (SSHD is None or os.geteuid() != 0) and not os.environ.get("CI"),
    reason="needs sshd, and root to run one (Debian: openssh-server)",
)


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The command that reaches the hosts n1 and n2; n3 is switched off."""
    folder, port = tmp_path_factory.mktemp("ssh"), free_port()
    for name in ("user", "host"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", name], cwd=folder, check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\n"
        "PidFile none\nStrictModes no\n"
    )
    common = "HostName 127.0.0.1\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n"
    (folder / "ssh_config").write_text(
        f"Host n3\nPort {free_port()}\nHost n1 n2\nPort {port}\nHost *\nIdentityFile {folder}/user\n{common}"
    )
    assert SSHD is not None
    server = subprocess.Popen([SSHD, "-D", "-f", str(folder / "sshd_config")])
    yield f"ssh -F {folder}/ssh_config"
    server.terminate()
    server.wait()


def launch(ssh: str, folder: Path, hosts: str, *words: str, port: int = 0) -> subprocess.Popen[str]:
    """Starts `fairlead launch` in a folder."""
    (folder / "train.py").write_text(SCRIPT)
    place = ["--hosts", hosts, "--ssh", ssh, "--main-address", "localhost", "--main-port", str(port or free_port())]
    return subprocess.Popen(
        [sys.executable, "-m", "fairlead", "launch", "--nproc", "1", *place, *words, "train.py"],
        cwd=folder,
        env={**os.environ, "NCCL_DEBUG": "WARN", "MINE": "yes", "SOME_TOKEN": "secret"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def pids(folder: Path, count: int) -> list[int]:
    """The ranks, once they are there."""
    paths = [folder / f"pid-{rank}" for rank in range(count)]
    until(lambda: all(path.exists() and path.read_text() for path in paths))
    return [int(path.read_text()) for path in paths]


def until(true: Callable[[], bool]) -> None:
    """Waits."""
    deadline = time.monotonic() + 40
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether there is such a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@needs_sshd
def test_one_command_starts_all_hosts_and_ends_with_them(ssh: str, tmp_path: Path) -> None:
    launcher = launch(ssh, tmp_path, "n[1-2]", "--export", "MINE")
    ranks = pids(tmp_path, 2)
    processes = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(b"secret" in line or b"MINE=" in line for line in processes)
    (tmp_path / "finish").touch()
    out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, err
    assert sorted(out.splitlines()) == ["n1: [rank 0] 0 2 WARN yes", "n2: [rank 1] 1 2 WARN yes"]
    assert not any(map(is_running, ranks))


@needs_sshd
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_on_the_hosts(ssh: str, tmp_path: Path, number: int) -> None:
    """Ctrl-C stops all; so does the end of the starting process, however it ends."""
    launcher = launch(ssh, tmp_path, "n1,n2")
    ranks = pids(tmp_path, 2)
    launcher.send_signal(number)
    launcher.communicate(timeout=60)
    assert launcher.returncode == (130 if number == signal.SIGINT else -number)
    until(lambda: not any(map(is_running, ranks)))


@needs_sshd
def test_a_host_that_cannot_be_reached_is_named_in_the_words_of_ssh(ssh: str, tmp_path: Path) -> None:
    launcher = launch(ssh, tmp_path, "n1,n3")
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    assert "error: host n3 cannot be reached" in err
    assert "why:   ssh: connect to host 127.0.0.1 port" in err
    assert "Connection refused" in err


def test_hosts_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# mine\nn1\nuser@n2  # the slow one\n\n")
    assert hosts_of(None, str(file)) == ["n1", "user@n2"]
    assert hosts_of("rack[1-2]n[1-2]", None) == ["rack1n1", "rack1n2", "rack2n1", "rack2n2"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("n1,n1", "n1 is there more than once"),
        ("n[1-", "unbalanced bracket"),
        ("-oProxyCommand=x", "these are no hosts"),
        ("n1 slots=4", "'n1 slots=4' is more than a host"),
    ],
)
def test_what_is_no_list_of_hosts(tmp_path: Path, text: str, said: str) -> None:
    """What begins with a dash would be an option of ssh."""
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        hosts_of(None, str(file))
    assert said in caught.value.what
