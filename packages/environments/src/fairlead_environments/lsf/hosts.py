"""The hosts of an LSF job, wherever LSF left them.

- LSB_HOSTS: `h1 h1 h2 h2`, one word per slot; LSF leaves it out when the list would be too long.
- LSB_MCPU_HOSTS: `h1 2 h2 2`, host and slots in turn.
- LSB_DJOB_RANKFILE, LSB_DJOB_HOSTFILE, LSB_AFFINITY_HOSTFILE: files with a line per slot or task, the host first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fairlead import Unused
from fairlead.errors import ConfigError
from fairlead.interfaces import Setting
from fairlead.variables import malformed, present, text
from fairlead_environments.variables import short_name

_FILES = ("LSB_DJOB_RANKFILE", "LSB_DJOB_HOSTFILE", "LSB_AFFINITY_HOSTFILE")


@dataclass(frozen=True)
class JobHosts:
    """The host of each slot of a job in LSF's order, and the variable that says it."""

    slots: tuple[str, ...]
    reason: str

    @property
    def hosts(self) -> tuple[str, ...]:
        """Each host once, in order."""
        return tuple(dict.fromkeys(self.slots))

    def compute_hosts(self, num_nodes: int | None) -> Setting:
        """The hosts that run tasks of `jsrun`: without the launch node, if the job has one.

        Where it is known on how many nodes tasks run, one host too many is it; else a first host with a single slot,
        when all others have more, or when it is the first line of JSM's rank file.
        """
        hosts, counts = self.hosts, Counter(self.slots)
        if len(hosts) == num_nodes:
            return Setting(hosts, f"unique hosts in {self.reason}")
        # JSM's own file begins with the launch node; elsewhere only a single slot among several tells it.
        others_have_more = all(counts[host] > 1 for host in hosts[1:]) or self.reason == "LSB_DJOB_RANKFILE"
        looks_like_one = len(hosts) > 1 and counts[hosts[0]] == 1 and others_have_more
        if looks_like_one or len(hosts) - 1 == num_nodes:
            return Setting(hosts[1:], f"unique hosts in {self.reason} without the launch node {hosts[0]}")
        return Setting(hosts, f"unique hosts in {self.reason}")


def read_hosts(environ: Mapping[str, str]) -> JobHosts:
    """The job's hosts from the first source that is there."""
    plain = text(environ, "LSB_HOSTS")
    if plain is not None:
        return JobHosts(tuple(plain.value.split()), plain.reason)
    counted = text(environ, "LSB_MCPU_HOSTS")
    if counted is not None:
        return JobHosts(_counted(counted), counted.reason)
    file = text(environ, *_FILES)
    if file is not None:
        return JobHosts(_lines(file), file.reason)
    raise ConfigError(
        "LSB_HOSTS is not set",
        where="environment variable LSB_HOSTS",
        why=f"LSF sets LSB_HOSTS, LSB_MCPU_HOSTS or one of {', '.join(_FILES)} in every job",
        fix="do not unset them between LSF and this process, or name another `environment`",
    )


def _counted(found: Setting) -> tuple[str, ...]:
    words = found.value.split()
    names, counts = words[::2], words[1::2]
    if len(names) != len(counts) or not all(count.isdigit() and int(count) > 0 for count in counts):
        raise malformed(found.reason, found.value, "hosts and slots in turn, such as 'h1 4 h2 4'")
    return tuple(name for name, count in zip(names, counts, strict=True) for _ in range(int(count)))


def _lines(found: Setting) -> tuple[str, ...]:
    try:
        lines = Path(found.value).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the file that {found.reason} names cannot be read",
            where=found.value,
            why=str(error),
            fix="make the file visible here (containers: mount it), or name another `environment`",
        ) from error
    hosts = tuple(line.split()[0] for line in lines if line.strip())
    if not hosts:
        raise ConfigError(f"the file that {found.reason} names is empty", where=found.value)
    return hosts


def index_of(host: str, hosts: tuple[str, ...]) -> int | None:
    """The index of a host by its full name, else by its short name if only one host has it."""
    if host in hosts:
        return hosts.index(host)
    short = [short_name(other) for other in hosts]
    return short.index(short_name(host)) if short.count(short_name(host)) == 1 else None


def idle_job(environ: Mapping[str, str]) -> Unused | None:
    """What an LSF job holds that this process, started by LSF itself, leaves unused; None: nothing."""
    if text(environ, "LSB_JOBID") is None:
        return None
    started = (("JSM_NAMESPACE_RANK",), ("LSF_PM_TASKID",), ("OMPI_COMM_WORLD_RANK",), ("PMI_RANK",))
    known = ("LSB_HOSTS", "LSB_MCPU_HOSTS")
    if any(present(environ, names) for names in started) or text(environ, *known) is None:
        return None
    try:
        job = read_hosts(environ)
    except ConfigError:  # this run uses none of LSF's variables, so a malformed one does not matter to it
        return None
    count = len(job.compute_hosts(None).value)
    if count < 2:
        return None
    why = "this process is one task: neither jsrun nor blaunch started it"
    return Unused(f"LSF allocated {count} hosts ({job.reason})", why, "blaunch")
