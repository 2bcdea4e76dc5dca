"""What the tests of `fairlead checkpoint` share: checkpoints of each kind, and the command in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fairlead import PluginManager
from fairlead.cli import main
from fairlead.testing import FakeEntryPoint
from fairlead_checkpoint_io.commands.checkpoint import checkpoint
from fairlead_checkpoint_io.distributed_shards import distributed_shards
from fairlead_checkpoint_io.torch_file import torch_file
from fairlead_runs.commit import Checkpoint, checkpoint_name, publish, stage, write_file


@dataclass
class Said:
    """What a command has answered."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Its JSON; nothing else may be on stdout."""
        return json.loads(self.out)


Command = Callable[..., Said]


def command(folder: Path, capsys: pytest.CaptureFixture[str], more: Mapping[str, object] | None = None) -> Command:
    """`fairlead checkpoint` in a folder, with `more` plugins than ours."""
    ours = {
        "command.checkpoint": checkpoint,
        "checkpoint_io.torch": torch_file,
        "checkpoint_io.distributed": distributed_shards,
    }
    plugins = PluginManager([FakeEntryPoint(key, plugin) for key, plugin in {**ours, **(more or {})}.items()])

    def run(*words: str | Path) -> Said:
        code = main(["checkpoint", *map(str, words)], plugins=plugins, environ={}, cwd=folder)
        return Said(code, *capsys.readouterr())

    return run


def saved(root: Path, step: int, *, ranks: int = 2, state: bytes = b"state", **metadata: Any) -> Checkpoint:
    """A published checkpoint whose files are what they are told to be."""
    staged = stage(root, checkpoint_name(step), token="s1")
    hashes = {"state.ckpt": write_file(staged / "state.ckpt", state)}
    for rank in range(ranks):
        name = f"rank-{rank:05d}.pt"
        hashes[name] = write_file(staged / name, b"rank" * (rank + 1))
    known: Mapping[str, Any] = {"step": step, "epoch": 0, "start": 1, "world_size": ranks, **metadata}
    return publish(staged, known, hashes=hashes)


def flip(path: Path, at: int = -1) -> None:
    """Changes one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
