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
from fairlead_launch.settings import COMMAND_INTERVAL_S, OPTIONS, LaunchConfig


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
    for field, (metavar, *names) in OPTIONS.items():
        spelled = [name for dashed in names for name in (dashed, f"--{dashed[2:].replace('-', '_')}")]
        text = str(LaunchConfig.model_fields[field].description)
        help_text = f"{text[0].lower()}{text[1:].rstrip('.')}".replace("%", "%%")
        parser.add_argument(
            *dict.fromkeys(spelled), dest=field, metavar=metavar, default=argparse.SUPPRESS, help=help_text
        )
    parser.add_argument(
        "--print-commands", "--print_commands", action="store_true", help="print the command of each node, and exit"
    )


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
    """The config of these arguments; a `ConfigError` names the wrong ones."""
    given = {name: value for name, value in vars(arguments).items() if name in LaunchConfig.model_fields}
    try:
        return LaunchConfig.model_validate({"monitor_interval": COMMAND_INTERVAL_S, **given}, strict=False)
    except ValidationError as error:
        reasons: dict[str, list[str]] = {}
        for one in error.errors():  # one for each kind of value that an option may have
            reason = one["msg"].removeprefix("Value error, ")
            found = reasons.setdefault(str((*one["loc"], "")[0]), [])
            found.append(reason.removeprefix("Input should be ") if found else reason)
        wrong = {name: ", or ".join(found) for name, found in reasons.items()}
        raise ConfigError(
            "; ".join(f"{OPTIONS[name][1]} {given[name]}: {why}" if name else why for name, why in wrong.items()),
            where="fairlead launch",
            fix="see fairlead launch --help",
        ) from error
