"""`fairlead prepare deepspeed`: compiles what DeepSpeed would compile in the first step of a run, on every rank."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Final

from fairlead.cli.session import Session
from fairlead.errors import ConfigError
from fairlead.plugin_classes import CommandPlugin

OPS: Final = ("cpu_adam", "fused_adam", "async_io")
"""What the presets use: the optimizers for offloaded and for GPU state, and NVMe."""

prepare: Final = CommandPlugin(
    "prepare",
    "compile ahead what a strategy would compile in its first step (deepspeed: minutes)",
    arguments="fairlead_strategies.deepspeed.prepare:arguments",
    runtime="fairlead_strategies.deepspeed.prepare:run",
    engines=("torch", "deepspeed"),
    extra="deepspeed",
    group="installation",
    example=("deepspeed", "--ops", "no_such_op"),
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `fairlead prepare`."""
    parser.add_argument("strategy", choices=("deepspeed",), help="the strategy to compile for")
    parser.add_argument(
        "--ops", nargs="+", metavar="OP", help=f"names of DeepSpeed's ops (default: {', '.join(OPS)}, if supported)"
    )


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Compiles the ops one after another, and says of each how long it took and where it is."""
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints while it is imported
        known: dict[str, Any] = importlib.import_module("deepspeed.ops.op_builder.all_ops").ALL_OPS
        device = importlib.import_module("deepspeed.accelerator").get_accelerator().device_name()
    names = arguments.ops or [name for name in OPS if name in known and (device != "cpu" or name != "fused_adam")]
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(
            f"DeepSpeed has no op {', '.join(unknown)} for {device}",
            where="--ops",
            fix=f"choose of: {', '.join(known)}",
        )
    if shutil.which("ninja") is None or not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise ConfigError("no C++ compiler and ninja on this machine", fix="apt install g++ ninja-build")
    total = 0.0
    for name in names:
        builder = known[name]
        if not builder.is_compatible(verbose=False):
            session.print(f"{name:<12} not for this machine{_why(name)}")
            continue
        session.warn(f"{name:<12} compiling, which may take minutes ...")
        begun = time.perf_counter()
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                module = builder.load(verbose=False)
        except (RuntimeError, OSError, ImportError, subprocess.CalledProcessError) as error:
            raise ConfigError(f"{name} does not compile", why=str(error)[-2000:]) from error
        seconds = time.perf_counter() - begun
        total += seconds
        session.print(f"{name:<12} {seconds:6.1f} s  {Path(str(module.__file__)).parent}")
    session.print(
        f"{total:.1f} s; other nodes find it there if they see the folder: else set TORCH_EXTENSIONS_DIR to one"
    )
    return 0


def _why(name: str) -> str:
    return ": libaio is missing (apt install libaio-dev)" if name == "async_io" else ""
