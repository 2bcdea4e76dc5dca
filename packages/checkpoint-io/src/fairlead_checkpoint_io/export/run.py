"""`fairlead export`: a trained model in a file that runs without its code, compared with what Python computes."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch

import fairlead
from fairlead.cli.session import Session
from fairlead.engines import requirement
from fairlead.errors import ConfigError, MissingDependencyError, did_you_mean
from fairlead.install import install_line
from fairlead_checkpoint_io.commands.destination import prepare_target, write_at_once
from fairlead_checkpoint_io.commands.sources import Source, existing, is_stored, size_text, sources
from fairlead_checkpoint_io.commands.states import read_any, weights_of, write_weights
from fairlead_checkpoint_io.export.command import SUFFIXES
from fairlead_checkpoint_io.export.formats import KEY, Export, compare
from fairlead_checkpoint_io.export.interface import Interface, Value, interface_of, sample_of
from fairlead_checkpoint_io.export.model import Built, averaged, build, load, part_of, silent
from fairlead_runs import is_run
from fairlead_runs.commit import best_or_newest
from fairlead_runs.describe import shown_path

_ONNX: Final = ("onnx", "onnxscript", "onnxruntime")


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Reads the checkpoint, builds its model, writes the file, reads it back, compares, and reports."""
    missing = [requirement(one) for one in _ONNX if not session.plugins.is_installed(one)]
    if arguments.to == "onnx" and missing:
        raise MissingDependencyError(f"--to onnx needs {', '.join(missing)}", fix=install_line("onnx"))
    with _source(arguments.path, session) as (source, why):
        target = Path(session.cwd, arguments.output or f"{source.name}{SUFFIXES[arguments.to]}").expanduser()
        prepare_target(target, source.path, session=session, overwrite=arguments.overwrite, where="--output")
        state, average = read_any(source, arguments.trust), None
        weights: Mapping[str, Any] = weights_of(state, source.content)
        if arguments.ema is not None:
            weights, average = averaged(state, weights, arguments.ema, source.location)
        document = {
            "version": 1,
            "checkpoint": source.name,
            "step": state.get("global_step"),
            "epoch": state.get("epoch"),
            "average": average,
            "torch": torch.__version__,
            "fairlead": fairlead.__version__,
        }
        built = build(source, state, session, arguments.model, arguments.overrides)
        if built is not None:
            document |= {"model": built.name, "part": arguments.part}
            part = part_of(built, arguments.part)
            call = sample_of(built, part, Path(session.cwd, arguments.sample) if arguments.sample else None)
            load(built, state, weights, source)  # after the validation, whose hooks may make layers
            names = {"inputs": arguments.inputs, "outputs": arguments.outputs}
            interface = interface_of(part, call, built.root, arguments.fixed_batch, names)
            document |= {name: list(map(asdict, getattr(interface, name))) for name in ("inputs", "outputs")}
            document["normalization"] = _constants(built, arguments, session, interface)
            export = Export(interface, json.dumps(document), built.root, arguments.to)
            document |= {**_write(export, target, arguments.tolerance), "tolerance": arguments.tolerance}
        elif arguments.to == "safetensors":
            document["normalization"] = _constants(None, arguments, session, None)
            write_at_once(target, lambda path: write_weights(weights, path, {KEY: json.dumps(document)}))
        else:
            raise ConfigError(
                f"nothing says how to build the model, which {arguments.to} needs",
                where=source.location,
                why="the checkpoint is in no run directory of a job; what a loop writes down names no class",
                fix="name what makes it, --model module:factory, and a sample input, --sample FILE; "
                "--to safetensors holds the weights alone",
            )
        result = {"file": str(target), "to": arguments.to, "from": source.location, "why": why}
        _say({**result, "size": target.stat().st_size, **document}, arguments, session)
    return 0


@contextmanager
def _source(text: str, session: Session) -> Iterator[tuple[Source, str]]:
    """The checkpoint to export, and why it is that one: of a run the best, else the newest, as for `predict`."""
    why = ""
    if not is_stored(text) and is_run(path := existing(text, session)):
        best, why = best_or_newest(path / "checkpoints")
        text = str(best.path)
    with sources((text,), session) as (source,):
        yield source, why


def _write(export: Export, target: Path, tolerance: float) -> dict[str, Any]:
    """Writes under the final name, which exporters look at, compares, and only then moves it to its path."""
    found: dict[str, Any] = {}

    def fill(staged: Path) -> None:
        with tempfile.TemporaryDirectory(dir=staged.parent, prefix=".tmp-export-") as folder:
            path = Path(folder, target.name)
            export.write(path)
            with silent():
                found.update(compare(export, path, tolerance))
            os.replace(path, staged)

    write_at_once(target, fill)
    return found


def _constants(
    built: Built | None, arguments: argparse.Namespace, session: Session, interface: Interface | None
) -> dict[str, Any]:
    """The constants of inputs and outputs: of the file `--constants`, else of the model's or data's `normalization`."""
    found: Any = {}
    where = f"--constants {arguments.constants}"
    if arguments.constants is not None:
        try:
            found = json.loads(Path(session.cwd, arguments.constants).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            fix = 'name a file such as {"x": {"mean": [0.5], "std": [0.2]}}'
            raise ConfigError("the constants cannot be read", where=where, why=str(error), fix=fix) from error
    for owner in (built.data, built.model) if built is not None and arguments.constants is None else ():
        if isinstance(own := getattr(owner, "normalization", None), Mapping):  # a layer may be called so
            where, found = f"{type(owner).__name__}.normalization", own
    if not isinstance(found, Mapping) or not all(isinstance(one, Mapping) for one in found.values()):
        fix = 'write {"x": {"mean": [0.5], "std": [0.2]}}, with the names of inputs and outputs'
        raise ConfigError("these are no constants of inputs and outputs", where=where, fix=fix)
    names = [one.name for one in (*interface.inputs, *interface.outputs)] if interface is not None else list(found)
    for name in found:
        if name not in names:
            near = did_you_mean(str(name), names)
            raise ConfigError(
                f"{name!r} is neither an input nor an output",
                where=where,
                why=f"there are: {', '.join(names)}",
                fix=f"did you mean {near!r}?" if near else "use these names, or give others: --inputs, --outputs",
            )
    return {n: {key: _plain(one, f"{where}, {n}.{key}") for key, one in each.items()} for n, each in found.items()}


def _plain(value: Any, where: str) -> Any:
    """Numbers, lists of them, or text."""
    value = value.tolist() if hasattr(value, "tolist") else list(value) if isinstance(value, tuple) else value
    try:
        json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise ConfigError("constants must be finite", where=where, why=f"the value is {value}") from error
    except TypeError as error:
        raise ConfigError(f"a {type(value).__name__} cannot be embedded", where=where, why=str(error)) from error
    return value


def _say(result: Mapping[str, Any], arguments: argparse.Namespace, session: Session) -> None:
    if arguments.json:
        session.print_json(result)
        return
    more = f", {result['why']}" * bool(result["why"]) + f", averaged: {result['average']}" * bool(result["average"])
    file = shown_path(Path(result["file"]), session.cwd)
    origin = result["from"] if "://" in result["from"] else shown_path(Path(result["from"]), session.cwd)
    session.print(f"{file}: {result['to']}, {size_text(result['size'])}, of {origin}{more}")
    for kind in ("inputs", "outputs"):
        for one in result.get(kind, ()):
            session.print(f"{kind[:-1]:<12}{Value(**one)}")
    for name, each in result["normalization"].items():
        session.print(f"{'constants':<12}{name}: {', '.join(each)}")
    if "difference" in result:
        most = f"{result['difference']:.3g} at most ({result['output']})" if result["difference"] else "none"
        batches = [str(rows) for rows in result["batches"]]
        at = f", with batches of {', '.join(batches[:-1])} and {batches[-1]}" if batches else ", with the sample"
        session.print(f"{'difference':<12}from Python's: {most}{at}")
    for note in result.get("notes", ()):
        session.warn(f"note: {note}")
