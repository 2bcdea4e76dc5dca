"""The command `export`: its arguments. Imports no torch."""

from __future__ import annotations

import argparse
from typing import Final

from fairlead.plugin_classes import CommandPlugin

SUFFIXES: Final = {"torchscript": ".ts", "torch-export": ".pt2", "onnx": ".onnx", "safetensors": ".safetensors"}
"""How the file of each format is called."""

export = CommandPlugin(
    "export",
    "write a trained model as TorchScript, torch.export, ONNX or safetensors, and compare it with Python's",
    arguments="fairlead_checkpoint_io.export.command:export_arguments",
    runtime="fairlead_checkpoint_io.export.run:run",
    engines=("torch", "safetensors", "fairlead-distributed"),
    extra="torch",
    group="checkpoints",
    example=("no-such-run", "--to", "torchscript"),
)


def export_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `fairlead export`."""
    add = parser.add_argument
    add(
        "path",
        metavar="RUN|CHECKPOINT",
        help="a run directory (its best checkpoint by the metric that it monitors, else its newest), RUN/best, "
        "RUN/last, one checkpoint of any format, or a URL",
    )
    add("--to", metavar="FORMAT", choices=tuple(SUFFIXES), required=True, help=f"one of {', '.join(SUFFIXES)}")
    add("-o", "--output", metavar="FILE", help="the file to write (default: the checkpoint's name, here)")
    add(
        "--ema",
        metavar="NAME",
        nargs="?",
        const="",
        help="export averaged weights instead of the trained ones; NAME: which, where the checkpoint has several",
    )
    add(
        "--set",
        metavar="PATH=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="change the job that the model and data are built from, as --set run.code=..; repeatable",
    )
    add("--part", metavar="NAME", help="export one module of the model, as `net` or `net.encoder`")
    add(
        "--model",
        metavar="MODULE:FACTORY",
        help="what makes the model, for a checkpoint whose run names no class: a class or a function, called without "
        "arguments, or with the hyperparameters that Lightning has saved",
    )
    add(
        "--sample",
        metavar="FILE",
        help="a sample input, a file of torch.save: a tensor, a tuple of arguments, or a dict of named ones (default: "
        "what `forward` gets of the first batch of the validation data)",
    )
    add(
        "--constants",
        metavar="FILE",
        help="a JSON file of constants to embed, {NAME: {mean: ..., std: ...}} for inputs and outputs (default: the "
        "attribute `normalization` of the model or the data)",
    )
    add("--inputs", metavar="NAMES", help="names for the inputs, separated by commas (default: those of `forward`)")
    add("--outputs", metavar="NAMES", help="names for the outputs (default: the keys that it returns, or `output`)")
    add("--fixed-batch", action="store_true", help="allow only the sample's batch size (default: any)")
    add(
        "--tolerance",
        metavar="X",
        type=float,
        default=1e-5,
        help="the largest difference from Python's output that is allowed, as a share of the largest value where that "
        "is above 1 (default: 1e-5)",
    )
    add("--overwrite", action="store_true", help="overwrite an existing file")
    add(
        "--trust",
        metavar="NAME",
        action="append",
        default=[],
        help="a class that the checkpoint may contain. Repeatable",
    )
    add("--json", action="store_true", help="print one JSON document")
