"""What a test cluster consists of, and the `slurm.conf` that says so to SLURM."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import socket
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from integration_tests.slurm.system import free_ports, run, succeeds

__all__ = ["NAMESPACES", "Isolation", "Node", "Options", "Plan", "best_isolation"]

Isolation = Literal["network", "hostname", "none"]
"""What a node has of its own: network, hostname, PIDs and /dev/shm; all but the network; or nothing but its name."""

NAMESPACES = ("unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc")


@dataclass(frozen=True)
class Options:
    """What a cluster is asked to be.

    Args:
        nodes: How many, named n1, n2, ...
        cpus: CPUs that each claims to have; more than the machine has are believed.
        gpus: Fake GPUs of each: SLURM sets CUDA_VISIBLE_DEVICES, and nothing more.
        isolation: None: the strongest that this machine permits.
        conf: Lines to add to slurm.conf.
        watch: The cluster ends when this process has gone; None: when it is stopped.
    """

    nodes: int = 2
    cpus: int = 4
    gpus: int = 0
    isolation: Isolation | None = None
    conf: str = ""
    watch: int | None = None


@dataclass(frozen=True)
class Node:
    """Where a node's slurmd listens."""

    address: str
    port: int


@dataclass(frozen=True)
class Plan:
    """A cluster as it is to be started.

    Args:
        home: Holds its configuration, logs and state.
        sockets: A folder with a short path: those of UNIX sockets may have 107 characters.
        isolation: See `Isolation`.
        nodes: By name.
        controller: The address of slurmctld.
        port: Its port.
        bridge: The network device that joins the nodes, where each has a network.
        watch: See `Options`.
    """

    home: Path
    sockets: Path
    isolation: Isolation
    nodes: dict[str, Node]
    controller: str
    port: int
    bridge: str | None = None
    watch: int | None = None
    supervisor: int = field(default=0, compare=False)
    born: str | None = field(default=None, compare=False)

    @property
    def conf(self) -> Path:
        """For SLURM_CONF."""
        return self.home / "slurm.conf"

    @property
    def munge_socket(self) -> Path:
        """Where the daemons and commands find munged."""
        return self.sockets / "munge.sock"

    def save(self, name: str) -> None:
        """Writes the plan into the cluster's folder, for the processes of the cluster."""
        plain = {**dataclasses.asdict(self), "home": str(self.home), "sockets": str(self.sockets)}
        (self.home / name).write_text(json.dumps(plain, indent=1))

    @classmethod
    def load(cls, path: Path) -> Plan:
        """What `save` wrote."""
        plain = json.loads(path.read_text())
        nodes = {name: Node(**node) for name, node in plain["nodes"].items()}
        return cls(**{**plain, "home": Path(plain["home"]), "sockets": Path(plain["sockets"]), "nodes": nodes})

    @classmethod
    def make(cls, home: Path, options: Options) -> Plan:
        """Chooses addresses and ports, and writes every file that SLURM reads."""
        isolation = options.isolation or best_isolation()
        sockets = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        sockets.chmod(0o755)
        ports = free_ports(options.nodes + 1)
        tag = hashlib.sha256(str(home).encode()).hexdigest()[:6]
        network = _free_network(tag) if isolation == "network" else None
        names = range(1, options.nodes + 1)
        nodes = {f"n{number}": Node(_address(number, isolation, network), ports[number]) for number in names}
        plan = cls(
            home=home,
            sockets=sockets,
            isolation=isolation,
            nodes=nodes,
            controller=f"{network}.254" if network is not None else "127.0.0.1",
            port=ports[0],
            bridge=f"sc{tag}" if network is not None else None,
            watch=options.watch,
        )
        _write_files(plan, options, tag)
        return plan


def best_isolation() -> Isolation:
    """The strongest isolation that the kernel grants, tried for real."""
    if os.geteuid() != 0 or shutil.which("unshare") is None or not succeeds(*NAMESPACES, "hostname", "n1"):
        return "none"
    if not succeeds(*NAMESPACES, "--net", "ip", "link", "set", "lo", "up"):
        return "hostname"
    name = f"sct{os.getpid() % 10**8}"
    bridge = succeeds("ip", "link", "add", name, "type", "bridge")
    cable = bridge and succeeds("ip", "link", "add", f"{name}v", "type", "veth", "peer", "name", f"{name}w")
    for made, device in ((cable, f"{name}v"), (bridge, name)):
        if made:
            run("ip", "link", "del", device)
    return "network" if cable else "hostname"


def _address(number: int, isolation: Isolation, network: str | None) -> str:
    if isolation == "none":
        return "127.0.0.1"
    return f"127.0.0.{10 + number}" if network is None else f"{network}.{number}"


def _free_network(tag: str) -> str:
    used = run("ip", "-4", "-o", "addr")
    third = int(tag, 16) % 250
    while f" 10.213.{third}." in used:
        third = (third + 1) % 250
    return f"10.213.{third}"


def _write_files(plan: Plan, options: Options, tag: str) -> None:
    for name in ("state", "log", "dev", "jobcomp"):
        (plan.home / name).mkdir(parents=True, exist_ok=True)
    for name in plan.nodes:
        (plan.sockets / "spool" / name).mkdir(parents=True)
        (plan.sockets / "tmp" / name).mkdir(parents=True)
    here = socket.gethostname().split(".")[0]
    hosts = ["127.0.0.1 localhost", "::1 localhost ip6-localhost", f"{plan.controller} {here}"]
    # torch asks for the name of each client of a store, by its mapped address, and there is no name server to ask.
    hosts += [f"{prefix}{node.address} {name}" for name, node in plan.nodes.items() for prefix in ("", "::ffff:")]
    (plan.home / "hosts").write_text("\n".join(hosts) + "\n")
    key = plan.home / "munge.key"
    key.unlink(missing_ok=True)
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    if options.gpus:
        _write_gpus(plan, options.gpus)
    plan.conf.write_text(_slurm_conf(plan, options, here, tag))


def _write_gpus(plan: Plan, gpus: int) -> None:
    for number in range(gpus):  # any character device passes for a GPU; a plain file does not
        device = plan.home / "dev" / f"gpu{number}"
        device.unlink(missing_ok=True)
        device.symlink_to(os.devnull)
    numbers = f"[0-{gpus - 1}]" if gpus > 1 else "0"
    text = f"AutoDetect=off\nNodeName={_names(plan)} Name=gpu File={plan.home}/dev/gpu{numbers}\n"
    (plan.home / "gres.conf").write_text(text)


def _names(plan: Plan) -> str:
    return f"n[1-{len(plan.nodes)}]" if len(plan.nodes) > 1 else "n1"


def _slurm_conf(plan: Plan, options: Options, here: str, tag: str) -> str:
    user = run("id", "-un").strip()
    gres = f" Gres=gpu:{options.gpus}" if options.gpus else ""
    size = f"CPUs={options.cpus} RealMemory=16000{gres} State=UNKNOWN"
    if plan.isolation == "none":
        ports = ",".join(str(node.port) for node in plan.nodes.values())
        nodes = f"NodeName={_names(plan)} NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports} {size}"
    else:
        each = (f"NodeName={name} NodeAddr={n.address} Port={n.port} {size}" for name, n in plan.nodes.items())
        nodes = "\n".join(each)
    return f"""# Written by integration_tests/slurm.
ClusterName=test{tag}
SlurmctldHost={here}({plan.controller})
SlurmctldPort={plan.port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits as long as credentials live before it starts again: 120 s, unless told otherwise.
AuthInfo=socket={plan.munge_socket},cred_expire=5
StateSaveLocation={plan.home}/state
SlurmdSpoolDir={plan.sockets}/spool/%n
# Each node its own: PMIx makes a folder of the same name on each.
TmpFS={plan.sockets}/tmp/%n
SlurmctldPidFile={plan.sockets}/slurmctld.pid
SlurmdPidFile={plan.sockets}/slurmd.%n.pid
SlurmctldLogFile={plan.home}/log/slurmctld.log
SlurmdLogFile={plan.home}/log/slurmd.%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
MpiDefault=none
# No cgroups: tasks are followed by their parents, and nothing is pinned.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={plan.home}/jobcomp/jobs.txt
# The CPUs that are written here are believed, not counted.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# Quick rather than gentle.
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1,bf_resolution=1
KillWait=10
CompleteWait=0
SlurmctldTimeout=10
SlurmdTimeout=6
BatchStartTimeout=10
MessageTimeout=10
InactiveLimit=0
Waittime=0
MinJobAge=3600
ReturnToService=2
JobRequeue=1
# Jobs in `urgent` take nodes from those in `main`, which are requeued, and in `brief`, which are cancelled.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{"GresTypes=gpu" if options.gpus else "# no GPUs"}
{nodes}
PartitionName=DEFAULT Nodes=ALL MaxTime=INFINITE DefaultTime=INFINITE State=UP
PartitionName=main   Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=5
PartitionName=brief  PriorityTier=1 PreemptMode=CANCEL GraceTime=5
PartitionName=urgent PriorityTier=10 PreemptMode=OFF
{options.conf}
"""
