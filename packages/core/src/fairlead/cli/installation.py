"""`fairlead plugins` and `fairlead schema`: what is installed."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from fairlead.cli.session import Session
from fairlead.config import JobConfig
from fairlead.config.job import EXTENDS
from fairlead.errors import ConfigError, did_you_mean
from fairlead.install import first_party, install_line
from fairlead.plugin_classes import AXIS_PLUGINS
from fairlead.plugins import PluginRecord, engines_line


def plugins_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `fairlead plugins`."""
    parser.add_argument(
        "action", nargs="?", choices=["check"], help="run the conformance suites over the plugins, instead of a list"
    )
    parser.add_argument("dist", nargs="?", metavar="DIST", help="check only the plugins of this distribution")
    parser.add_argument("--axis", metavar="A", help=f"only this axis: {', '.join(AXIS_PLUGINS)}")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run_plugins(arguments: argparse.Namespace, session: Session) -> int:
    """Lists every discovered plugin, with what is wrong or missing; or checks what they do."""
    if arguments.axis is not None and arguments.axis not in AXIS_PLUGINS:
        near = did_you_mean(arguments.axis, AXIS_PLUGINS)
        raise ConfigError(
            f"unknown axis {arguments.axis!r}",
            where="--axis",
            why=f"axes: {', '.join(AXIS_PLUGINS)}",
            fix=f"did you mean {near!r}?" if near else None,
        )
    if arguments.action == "check":
        return _check(arguments, session)
    records = session.plugins.records(arguments.axis, load=True)
    if arguments.json:
        session.print_json([record.as_dict() for record in records])
        return 0
    axis, width = "", max((len(record.name) for record in records), default=0) + 2
    for record in records:
        if record.axis != axis:
            axis = record.axis
            session.print(f"{axis}:")
        session.print(f"  {record.name:<{width}}{_state(record, session)}")
    absent = sorted(
        {
            extra
            for key, extra in first_party().items()
            if arguments.axis in (None, key.partition(".")[0]) and key not in {r.key for r in records}
        }
    )
    if absent:
        session.print(
            f"\nplugins that are not installed: {install_line('check')} brings them all, without torch\n"
            f"with what training needs: {install_line(absent[0] if len(absent) == 1 else 'lightning')}"
        )
    return 0


def _check(arguments: argparse.Namespace, session: Session) -> int:
    """The suites of `fairlead.testing` over the installed plugins; 1 where one of them breaks the contract."""
    from fairlead.testing.runner import run_suite

    everything = session.plugins.records(arguments.axis, load=True)
    wanted = arguments.dist and canonicalize_name(arguments.dist)
    records = [record for record in everything if wanted in (None, canonicalize_name(record.dist))]
    if not records:
        dists = sorted({record.dist for record in everything})
        near = did_you_mean(arguments.dist or "", dists)
        raise ConfigError(
            f"no plugin of {arguments.dist!r} is installed" if arguments.dist else "no plugin is installed",
            where="fairlead plugins check",
            why=f"there are plugins of: {', '.join(dists) or 'nothing'}",
            fix=f"did you mean {near!r}?" if near else "pip install it, and name its distribution",
        )
    found: list[dict[str, Any]] = []
    for record in records:
        outcomes = list(run_suite(record, session.plugins))
        found += [{"plugin": record.key, "dist": record.dist, **dataclasses.asdict(one)} for one in outcomes]
        if not arguments.json:
            counts = Counter(one.result for one in outcomes)
            session.print(f"{record.key:<34}{', '.join(f'{number} {result}' for result, number in counts.items())}")
            for one in outcomes:
                if one.result == "failed":
                    session.print(textwrap.indent(f"{one.test}: {one.why}", "  "))
    if arguments.json:
        session.print_json(found)
    return 1 if any(one["result"] == "failed" for one in found) else 0


def _state(record: PluginRecord, session: Session) -> str:
    source = f"{record.dist} {record.version}"
    if record.error is not None:
        return f"broken      {source}: {record.error}"
    if record.missing:
        plugin = (
            session.plugins.command(record.name)
            if record.axis == "command"
            else session.plugins.get(record.axis, record.name)
        )
        return f"missing     {source}: needs {', '.join(record.missing)}; {engines_line(plugin)}"
    return f"available   {source}"


def schema_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `fairlead schema`."""
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="write to this file instead of stdout")


def job_schema() -> dict[str, Any]:
    """The JSON schema of a job file for the plugins that are installed: editors complete and check with it."""
    schema = JobConfig.model_json_schema()
    files = {"description": "The files, relative to this one, whose settings this one replaces."}
    one: dict[str, Any] = {"type": "string", "minLength": 1}
    schema["properties"][EXTENDS] = {**files, "anyOf": [one, {"type": "array", "items": one}]}
    # What a file extends may have the rest.
    schema["anyOf"] = [{"required": schema.pop("required")}, {"required": [EXTENDS]}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "A Fairlead job"}


def run_schema(arguments: argparse.Namespace, session: Session) -> int:
    """Prints or writes the JSON schema of a job."""
    text = json.dumps(job_schema(), indent=2) + "\n"
    if arguments.output is None:
        session.stdout.write(text)
        return 0
    path = session.cwd / arguments.output
    if not path.name or path.is_dir():
        raise ConfigError(f"{path} is a folder", where="-o", fix="name a file in it")
    try:
        written = path.with_name(f".{path.name}.{os.getpid()}")
        written.write_text(text, encoding="utf-8")
        os.replace(written, path)  # an editor may be reading the one before
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}", where="-o", why=error.strerror, fix="name a file in a folder that exists"
        ) from error
    session.print(f"wrote {path}")
    return 0
