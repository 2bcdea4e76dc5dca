"""What `fairlead doctor` takes, does and says."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import pkgutil
import signal
import socket
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from fairlead.cli.job import load_requested, set_argument
from fairlead.cli.session import Session
from fairlead.config import JobConfig, RunConfig, TrainerConfig
from fairlead.config_bases import AcceleratorConfigBase
from fairlead.errors import ConfigError
from fairlead.findings import raise_errors
from fairlead.interfaces import BuildContext, Requeuer
from fairlead.open_union import parse_backend
from fairlead.resolution import Resolution
from fairlead.resolve import resolve
from fairlead_diagnostics.checking import Requested
from fairlead_diagnostics.checks import HERE
from fairlead_diagnostics.checks.disk import existing
from fairlead_diagnostics.examine_run import examine_run
from fairlead_diagnostics.outcome import MOST, Outcome, decide
from fairlead_diagnostics.report import here_document, here_lines, screen_document, screen_lines
from fairlead_diagnostics.screen import ARRIVE_S, Place, Screen, Screened
from fairlead_diagnostics.verdict import Verdict
from fairlead_diagnostics.worker import Worker
from fairlead_runs.commands.texts import find_run
from fairlead_runs.exclusion import SCREENS
from fairlead_runs.naming import run_directory

_STOPS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `fairlead doctor`."""
    parser.add_argument(
        "job",
        metavar="JOB",
        nargs="*",
        help="a job, in one file or several: test what it needs, and where its run directory goes",
    )
    set_argument(parser)
    parser.add_argument(
        "--nodes",
        action="store_true",
        help="screen all nodes of this allocation; start it once on each: srun --ntasks-per-node=1",
    )
    parser.add_argument(
        "--run",
        metavar="RUN",
        help="without JOB: say what is wrong with this run, while it crawls or hangs; with --nodes: the run directory "
        "(default: that of JOB)",
    )
    parser.add_argument(
        "--max-excluded",
        metavar="N",
        type=int,
        default=MOST,
        help=f"with --nodes: how many nodes the run may exclude; 0: only report (default {MOST})",
    )
    parser.add_argument(
        "--start-timeout",
        metavar="S",
        type=float,
        default=ARRIVE_S,
        help=f"with --nodes: seconds to wait for the other nodes to start (default {ARRIVE_S:g})",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Looks at this machine, or takes part in the screen of all nodes."""
    if arguments.run is not None and not arguments.job and not arguments.nodes:
        return examine_run(find_run(arguments.run, session), arguments, session)
    if arguments.run is not None and not arguments.nodes:
        raise ConfigError("--run with a JOB is for --nodes", where="--run", fix="name the run, or the job, or --nodes")
    job = _job(arguments, session)
    resolution = _resolved(job, session)
    if not arguments.nodes:
        return _here(_requested(job, resolution, str(_runs(arguments, job, session))), arguments, session)
    position = _position(resolution)
    directory = _run(arguments, job, resolution, session)
    requested = _requested(job, resolution, str(directory) if directory is not None else None)
    start = hashlib.sha256(position.identity.encode()).hexdigest()[:12]

    def show(screened: Screened) -> None:
        if not arguments.json:
            for line in screen_lines(screened):
                session.print(line)
        elif screened.outcome is not None:
            session.print_json(screen_document(screened, screened.outcome))

    screen = Screen(
        position,
        requested,
        partial(_decided, directory, resolution, arguments.max_excluded, session),
        show,
        folder=directory / SCREENS / start if directory is not None else None,
        environ=session.environ,
        arrive_s=arguments.start_timeout,
    )
    if position.node == 0:
        session.warn(f"doctor: looking at {position.nodes} node{'s' if position.nodes > 1 else ''}")
    with _not_stopped():
        return screen.run()


@contextlib.contextmanager
def _not_stopped() -> Iterator[None]:
    """Ignores the signals that request a stop: there is nothing to save, and the ranks get them, or the job is killed.

    The requeue signals all of the job, too, and has to be followed by the exclusion.
    """
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _job(arguments: argparse.Namespace, session: Session) -> JobConfig | None:
    if not arguments.job:
        if arguments.overrides:
            raise ConfigError("--set is for a job", where="--set", fix="name the job, too")
        return None
    loaded = load_requested(arguments, session)
    raise_errors(loaded.findings)
    return loaded.job


def _resolved(job: JobConfig | None, session: Session) -> Resolution:
    """Who is here, on which kind of device, and who requeues: what of a job holds with one process on each node."""
    trainer = job.trainer if job is not None else TrainerConfig.model_validate({}, context={"plugins": session.plugins})
    alone: dict[str, Any] = {"devices": "auto", "num_nodes": "auto", "strategy": "auto", "precision": None}
    kind = job.resources.device if job is not None and job.resources is not None else None
    if kind is not None and not isinstance(trainer.accelerator, AcceleratorConfigBase):
        known = session.plugins.names("accelerator")
        alone["accelerator"] = parse_backend("accelerator", kind if kind in known else "cuda", session.plugins)
    return resolve(trainer.model_copy(update=alone), environ=session.environ, plugins=session.plugins)


def _requested(job: JobConfig | None, resolution: Resolution, folder: str | None) -> Requested:
    resources = job.resources if job is not None else None
    count = resources.devices_per_node if resources is not None else None
    if count is None and job is not None and job.trainer.devices not in ("auto", -1):
        count = len(job.trainer.devices) if isinstance(job.trainer.devices, list) else int(job.trainer.devices)
    return Requested(
        device=resolution.device_type,
        backend=resolution.backend if resolution.backend in ("gloo", "nccl") else "gloo",
        count=count,
        found=0 if resolution.devices_found.unlimited else resolution.devices_found.count,
        found_by=resolution.devices_found.evidence,
        memory_gib=resources.memory_gib if resources is not None else None,
        host_memory_gib=resources.host_memory_gib if resources is not None else None,
        folder=folder,
    )


def _here(requested: Requested, arguments: argparse.Namespace, session: Session) -> int:
    with Worker(requested, session.environ) as worker:
        results = {check.name: worker.run(check) for check in HERE}
    document = here_document(results)
    if arguments.json:
        session.print_json(document)
    else:
        session.print("\n".join(here_lines(results)))
    return 0 if document["fit"] else 1


def _position(resolution: Resolution) -> Place:
    """Which node this is, from what the environment's plugin says."""
    if resolution.environment is None:
        raise_errors(resolution.findings)
    topology, start = resolution.topology, resolution.topology.start
    environment = resolution.settings["environment"]
    by_hand = (
        "srun --nodes=$SLURM_JOB_NUM_NODES --ntasks=$SLURM_JOB_NUM_NODES --ntasks-per-node=1 fairlead doctor --nodes"
    )
    if not topology.launched or topology.num_nodes is None or topology.node_rank is None:
        raise ConfigError(
            "this process is not one of several that a launcher has started, one on each node",
            where="fairlead doctor --nodes",
            why=f"environment: {environment.value} ({environment.reason})",
            fix=f"start it so in SLURM: {by_hand}; without --nodes it looks at this machine alone",
        )
    if topology.local_world_size is not None and topology.local_world_size.value > 1:
        raise ConfigError(
            f"{topology.local_world_size.value} doctors were started on this node",
            where="fairlead doctor --nodes",
            why=topology.local_world_size.reason,
            fix=f"start one on each: {by_hand}",
        )
    node, nodes = int(topology.node_rank.value), int(topology.num_nodes.value)
    hosts = start.hosts if start is not None else ()
    main = str(topology.main_address.value) if topology.main_address is not None else ""
    port = topology.main_port.value if topology.main_port is not None else None
    ports = start.ports if start is not None and start.ports else (port,) if port is not None else ()
    if nodes > 1 and not (main and ports):
        raise ConfigError(
            "the nodes do not know where to meet",
            where="fairlead doctor --nodes",
            fix="set MASTER_ADDR and MASTER_PORT",
        )
    return Place(
        node=node,
        nodes=nodes,
        host=hosts[node] if len(hosts) == nodes else socket.gethostname(),
        main=main,
        ports=ports,
        identity=start.identity if start is not None else f"{main}:{port}",
        hosts=hosts,
    )


def _run(arguments: argparse.Namespace, job: JobConfig | None, resolution: Resolution, session: Session) -> Path | None:
    if arguments.run is not None:
        return Path(session.cwd, arguments.run).absolute()
    if job is None:
        return None
    return run_directory(job.model_dump(mode="json"), job.run, resolution.job, session.cwd)


def _runs(arguments: argparse.Namespace, job: JobConfig | None, session: Session) -> Path:
    """Where runs go, or would: nothing is made there."""
    return existing(session.cwd / (arguments.run or (job.run.dir if job is not None else RunConfig().dir)))


def _decided(
    run: Path | None, resolution: Resolution, most: int, session: Session, verdict: Verdict, hosts: Mapping[int, str]
) -> Outcome:
    def requeuer() -> Requeuer | None:
        if resolution.requeue is None or resolution.settings["requeue"].value == "none":
            return None
        runtime = pkgutil.resolve_name(str(session.plugins.of(resolution.requeue).runtime))
        made: Requeuer = runtime(resolution.requeue, BuildContext(resolution, session.environ, session.plugins))
        return made

    return decide(verdict, hosts, run, requeuer, most=most)
