"""Finds the command, runs it, and turns every error into one block of text and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import os
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

from fairlead.cli.session import Session
from fairlead.engines import requirement
from fairlead.errors import ConfigError, FairleadError, MissingDependencyError
from fairlead.plugin_classes import CommandPlugin
from fairlead.plugins import PluginManager, engines_line

_GROUPS: Final = {
    "installation": "the installation",
    "job": "a job (a YAML file, or module:object)",
    "runs": "runs",
    "checkpoints": "checkpoints",
}


class _Parser(argparse.ArgumentParser):
    """Reports a wrong call as every other mistake is reported."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, where=self.prog, fix=f"see {self.prog} --help")


def main(
    argv: Sequence[str] | None = None,
    *,
    plugins: PluginManager | None = None,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> int:
    """Runs one command and returns its exit code; None stands for what this process has."""
    words = list(sys.argv[1:] if argv is None else argv)
    # What follows it, or the script of `launch`, is a script's; `launch` has its own --debug before that.
    ours = 1 if words[:1] == ["launch"] else words.index("--") if "--" in words else len(words)
    debug = "--debug" in words[:ours]
    words = [*(word for word in words[:ours] if word != "--debug"), *words[ours:]]
    try:
        session = Session(
            plugins=plugins if plugins is not None else PluginManager(),
            environ=os.environ if environ is None else environ,
            cwd=cwd or Path.cwd(),
            argv=tuple(words),
            debug=debug,
        )
        return _run(words, session)
    except FairleadError as error:
        if debug:
            raise
        print(f"error: {error.block()}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped by the keyboard", file=sys.stderr, flush=True)
        return 130
    except BrokenPipeError:
        # The reader of our output went away (`fairlead plugins | head`): not an error of ours.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if debug:
            raise
        print(
            f"error: {type(error).__name__}: {error}\n"
            "  why:   this is a defect in Fairlead or in a plugin, not in your job\n"
            "  do:    run it again with --debug and report the traceback",
            file=sys.stderr,
            flush=True,
        )
        return 1


def _run(words: list[str], session: Session) -> int:
    if not words or words[0] in {"-h", "--help", "help"}:
        session.print(_help(session))
        return 0 if words else 2
    if words[0] in {"-V", "--version"}:
        from fairlead import __version__

        session.print(f"fairlead {__version__}")
        return 0
    if words[0].startswith("-"):
        raise ConfigError(f"unknown option {words[0]!r}", where="fairlead", fix="see fairlead --help")
    command = session.plugins.command(words[0])
    parser = _Parser(prog=f"fairlead {command.name}", description=command.help, allow_abbrev=False)
    pkgutil.resolve_name(command.arguments)(parser)
    parser.epilog = "--debug shows the traceback of an error."
    try:
        arguments = _parsed(parser, words[1:])
    except SystemExit:
        return 0  # only --help exits; a wrong call is `_Parser.error`
    missing = [requirement(r) for r in command.engines if not session.plugins.is_installed(r)]
    if missing:
        raise MissingDependencyError(f"fairlead {command.name} needs {', '.join(missing)}", fix=engines_line(command))
    return int(pkgutil.resolve_name(command.runtime)(arguments, session))


def _parsed(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """Options may stand between the files of a job; not where a script's own words follow, as for `launch`."""
    if "--" in words:
        return parser.parse_args(words)
    try:
        return parser.parse_intermixed_args(words)
    except TypeError:  # the parser has sub-commands, or takes the rest of the line
        return parser.parse_args(words)


def _help(session: Session) -> str:
    from fairlead import __version__

    lines = [f"fairlead {__version__}: leads a PyTorch training job onto the hardware and cluster it finds", ""]
    commands: dict[str, list[CommandPlugin]] = {}
    broken = []
    names = session.plugins.names("command")
    width = max(map(len, names), default=0) + 2
    for name in names:
        try:
            command = session.plugins.command(name)
        except FairleadError as error:
            broken.append(f"  {name:<{width}}{error.why or error.what}")
            continue
        commands.setdefault(command.group, []).append(command)
    for group in [*_GROUPS, *(g for g in commands if g not in _GROUPS)]:
        if group in commands:
            lines.append(f"{_GROUPS.get(group, group)}:")
            lines += [f"  {c.name:<{width}}{c.help}" for c in commands[group]]
            lines.append("")
    if broken:
        lines += ["not usable:", *broken, ""]
    lines.append("fairlead <command> --help tells more; --debug shows tracebacks.")
    return "\n".join(lines)
