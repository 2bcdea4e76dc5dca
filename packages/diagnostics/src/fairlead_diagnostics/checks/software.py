"""Python, and torch if it is there."""

from __future__ import annotations

import importlib.util
import platform
import sys

from fairlead_diagnostics.checking import Bench, Result


def python(bench: Bench) -> Result:
    """Which Python this is."""
    return Result(True, f"{platform.python_version()}, {sys.executable}")


def torch_here(bench: Bench) -> Result:
    """Which torch; one that is installed and cannot be imported is unfit."""
    if importlib.util.find_spec("torch") is None:
        return Result(None, "torch is not installed")
    import torch

    bench.progress()
    built = torch.version.cuda or torch.version.hip
    return Result(True, torch.__version__ + (f", built for {built}" if built else ", for CPUs"))
