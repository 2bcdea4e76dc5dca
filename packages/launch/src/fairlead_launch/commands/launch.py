"""`fairlead launch`."""

from __future__ import annotations

import argparse
import traceback

from pydantic import ValidationError

from fairlead.cli.session import Session
from fairlead.errors import ConfigError, FairleadError
from fairlead_launch.hosts import node_commands
from fairlead_launch.launcher import DistributedLauncher
from fairlead_launch.prove.script import prove_script
from fairlead_launch.settings import LaunchConfig


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `fairlead launch`; before the script ours, behind it the script's."""
    options(parser)
    parser.add_argument(
        "--prove-resume",
        action="store_true",
        help="train the first steps of the script twice in a separate folder, once with a kill and a resume, and "
        "compare every bit; exits with 0 if equal, else with 1 and the first difference",
    )
    parser.add_argument(
        "--prove-steps", metavar="STEPS", type=int, default=8, help="the optimizer steps of that (default 8)"
    )
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as in `python -m`")
    parser.add_argument("--anywhere", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--debug", action="store_true", help="show the launcher's traceback on an error")
    parser.add_argument("script", metavar="SCRIPT", help="the script that each process runs")
    parser.add_argument("words", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments")


def options(parser: argparse.ArgumentParser) -> None:
    """The launcher's own options, with the names that other launchers have for them."""
    add = parser.add_argument
    add("--nproc", "--nproc-per-node", "--nproc_per_node", dest="nproc_per_node", metavar="N|auto|gpu", default="auto",
        help="processes per node (default auto: one per GPU, or one)")  # fmt: skip
    add("--nnodes", metavar="N|MIN:MAX", default="1", help="number of nodes (default 1)")
    add("--node-rank", "--node_rank", metavar="R", type=int, default=0, help="rank of this node, from 0")
    add("--main-address", "--master-addr", "--master_addr", dest="master_addr", metavar="HOST", default="127.0.0.1",
        help="name or address of the first node")  # fmt: skip
    add("--main-port", "--master-port", "--master_port", dest="master_port", metavar="PORT", type=int,
        help="port of the rendezvous (default 29500; on one node the first free port from there)")  # fmt: skip
    add("--hosts", metavar="HOSTS",
        help="the nodes, as n1,n2 or n[1-4]: start the launcher of each from here, over ssh")  # fmt: skip
    add("--hostfile", metavar="FILE", help="a file with the nodes, one host per line")
    add("--ssh", metavar="COMMAND", default="ssh", help="the command that connects to a host (default ssh)")
    add("--export", metavar="NAMES", default="",
        help="pass these variables to the hosts too, as NAME,NAME; NCCL_* and the like are passed anyway")  # fmt: skip
    add("--print-commands", "--print_commands", action="store_true", help="print the command of each node, and exit")
    add("--backend", default="auto", help="backend for fairlead_distributed.init_process_group() (default auto)")
    add("--max-restarts", "--max_restarts", metavar="N", type=int, default=3,
        help="how often to restart all processes after a failure (default 3)")  # fmt: skip
    add("--monitor-interval", "--monitor_interval", metavar="S", type=float, default=0.1,
        help="seconds between two checks of the processes (default 0.1)")  # fmt: skip
    add("--start-timeout", "--start_timeout", metavar="S", type=float, default=600.0,
        help="seconds for all processes to join the process group, after the first one (default 600)")  # fmt: skip
    add("--log-dir", "--log_dir", metavar="DIR",
        help="folder of the processes' logs (default: logs, in the run directory if there is one)")  # fmt: skip
    add("--start-method", "--start_method", choices=("fork-server", "spawn"), default="fork-server",
        help="fork-server (default): import once and fork; spawn: each process imports for itself")  # fmt: skip
    add("--tail", metavar="RANKS", default="all", help="ranks whose output is shown: all (default), none, or as 0,4-7")


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Runs the script; a failure is an error of the command."""
    if arguments.anywhere:
        _take_options_behind(arguments)
    try:
        config = config_of(arguments)
        if arguments.print_commands:
            for line in node_commands(config, [arguments.script, *arguments.words]):
                session.print(line)
            return 0
        if arguments.prove_resume:
            return prove_script(config, (arguments.script, *arguments.words), session, arguments.prove_steps)
        launcher = DistributedLauncher(config, environ=session.environ, plugins=session.plugins, stderr=session.stderr)
        return launcher.run(arguments.script, *arguments.words)
    except FairleadError:
        if arguments.debug:
            traceback.print_exc()
        raise


def _take_options_behind(arguments: argparse.Namespace) -> None:
    """Takes our options from behind the script, as some launchers do: all up to `--`, without it those known."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    options(parser)
    words = arguments.words
    split = words.index("--") if "--" in words else None
    try:
        _, rest = parser.parse_known_args(words[:split], arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error), where="fairlead.launcher", fix="see fairlead launch --help") from error
    if split is not None and rest:
        raise ConfigError(
            f"unknown option {rest[0]!r}", where="fairlead.launcher", fix="the script's own go behind `--`"
        )
    arguments.words = rest if split is None else words[split + 1 :]


def config_of(arguments: argparse.Namespace) -> LaunchConfig:
    """The config that these arguments ask for; a `ConfigError` names the wrong ones."""
    given = {name: value for name, value in vars(arguments).items() if name in LaunchConfig.model_fields}
    for name in ("nproc_per_node", "nnodes"):
        if str(given[name]).isdecimal():
            given[name] = int(given[name])
    try:
        return LaunchConfig(**given)
    except ValidationError as error:
        wrong = {str((*one["loc"], "")[0]): one["msg"].removeprefix("Value error, ") for one in error.errors()}
        raise ConfigError(
            "; ".join(f"--{n.replace('_', '-')} {given[n]}: {why}" if n else why for n, why in wrong.items()),
            where="fairlead launch",
            fix="see fairlead launch --help",
        ) from error
