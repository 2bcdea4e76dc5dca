"""The conformance suite of checkpoint IOs."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from fairlead.errors import FairleadError
from fairlead.testing.conformance import PluginConformance


class CheckpointIOConformance(PluginConformance):
    """For plugins of the axis `checkpoint_io`."""

    axis = "checkpoint_io"
    builds: ClassVar[Mapping[str, str]] = {"trainer": "lightning.fabric.plugins:CheckpointIO"}

    def state(self) -> dict[str, Any]:
        """A nested checkpoint with tensors, as Lightning's are."""
        torch = importlib.import_module("torch")  # an engine of the plugin under test, not of this module
        weights = {"weight": torch.arange(6.0).reshape(2, 3), "steps": torch.tensor(7)}
        return {"state_dict": weights, "epoch": 1, "loops": {"history": [1, 2.5, "x", None, True]}, "empty": {}}

    def test_a_checkpoint_comes_back(self, tmp_path: Path) -> None:
        """What is saved is loaded, equal in every part, and can be removed."""
        io = self.build(tmp_path / "run")
        path = tmp_path / "checkpoints" / "step-1.ckpt"
        io.save_checkpoint(self.state(), path)
        if hasattr(io, "submit"):  # `fairlead_runs.checkpoint_io.DurableSaves`
            io.wait()
        assert path.exists(), self.broken(
            "there is no checkpoint at its path after the save", "write it to the path that save_checkpoint is given"
        )
        loaded = io.load_checkpoint(path)
        self._same(loaded, self.state())
        io.remove_checkpoint(path)
        io.teardown()  # a backend that works in the background may remove there
        assert not path.exists(), self.broken(
            "the checkpoint is still there after remove_checkpoint and teardown", "remove it in one of the two"
        )

    def test_a_missing_checkpoint_is_named(self, tmp_path: Path) -> None:
        """Loading what is not there raises a `FairleadError` that names the path."""
        io = self.build(tmp_path / "run")
        path = tmp_path / "no-such.ckpt"
        message = None
        try:
            io.load_checkpoint(path)
        except FairleadError as error:
            message = str(error)
        finally:
            io.teardown()
        assert message is not None, self.broken(
            "loading a checkpoint that does not exist gave something", "raise fairlead.errors.CheckpointError"
        )
        assert "no-such.ckpt" in message, self.broken(
            f"the error does not name the path: {message}", "give it as `where`"
        )

    def test_an_interrupted_save_leaves_no_file(self, tmp_path: Path) -> None:
        """Ctrl-C in the middle of a save: what lies at the path afterwards would be taken for a checkpoint."""
        io = self.build(tmp_path / "run")
        path = tmp_path / "checkpoints" / "step-1.ckpt"
        ended = False
        try:
            io.save_checkpoint({**self.state(), "last": _Interrupts()}, path)
            if hasattr(io, "submit"):
                io.wait()
        except (Exception, KeyboardInterrupt):  # refused, or interrupted: what is left is looked at below
            ended = True
        finally:
            io.teardown()
        # A name with a dot is not taken for a checkpoint; a process that is killed cannot clean up.
        left = [str(one.relative_to(tmp_path)) for one in tmp_path.glob("checkpoints/[!.]*")]
        assert ended, self.broken(
            "a save that was interrupted returned as if it had been done", "let what interrupts it through"
        )
        assert not left, self.broken(
            f"an interrupted save leaves {', '.join(left)}", "write to a hidden name beside it, and rename at the end"
        )

    def test_a_pickle_is_refused(self, tmp_path: Path) -> None:
        """A checkpoint that runs code when it is loaded is not loaded, wherever it comes from."""
        torch = importlib.import_module("torch")
        io = self.build(tmp_path / "run")
        ran, path = tmp_path / "ran", tmp_path / "checkpoints" / "step-1.ckpt"
        path.parent.mkdir()
        torch.save({"state_dict": {}, "last": _Runs(ran)}, path)
        loaded = None
        try:
            loaded = io.load_checkpoint(path)
        except Exception:  # any refusal is one; what counts is that nothing ran
            loaded = None
        finally:
            io.teardown()
        assert not ran.exists(), self.broken("loading a checkpoint ran code in it", "load with weights_only=True")
        assert loaded is None, self.broken("a checkpoint with code in it was loaded", "refuse it")

    def test_the_commands_take_its_formats(self, tmp_path: Path) -> None:
        """`fairlead checkpoint` recognises what it saves by one of its formats, which work without an engine."""
        plugins = self.plugins()
        formats: list[Any] = []  # `fairlead_checkpoint_io.CheckpointFormat`s
        for reference in getattr(self.plugin(plugins), "formats", ()):
            module, _, name = reference.partition(":")
            self.imports_no_engine(module, "name what reads and writes as `module:callable`")
            self.require_engines()
            formats.append(getattr(importlib.import_module(module), name, None))
            assert hasattr(formats[-1], "fits"), self.broken(
                f"`formats` names {reference!r}, a {type(formats[-1]).__name__}", "name a CheckpointFormat"
            )
        if formats:
            io = self.build(tmp_path / "run")
            io.save_checkpoint(self.state(), tmp_path / "state.ckpt")
            io.teardown()
            assert any(one.fits(tmp_path / "state.ckpt") for one in formats), self.broken(
                "none of its formats fits what it saves", "name the one that does in `formats`"
            )

    def _same(self, got: Any, wanted: Any, path: str = "checkpoint") -> None:
        do = "save and load each part as it is"
        assert type(got) is type(wanted), self.broken(f"{path} came back as a {type(got).__name__}", do)
        if isinstance(wanted, dict):
            assert got.keys() == wanted.keys(), self.broken(f"{path} came back with the keys {sorted(got)}", do)
            for name in wanted:
                self._same(got[name], wanted[name], f"{path}[{name!r}]")
        elif hasattr(wanted, "tolist"):
            assert got.dtype == wanted.dtype, self.broken(f"{path} came back as {got.dtype}", do)
            assert got.tolist() == wanted.tolist(), self.broken(f"{path} came back changed", do)
        else:
            assert got == wanted, self.broken(f"{path} came back as {got!r}", do)


class _Interrupts:
    """Interrupts whoever writes it."""

    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


class _Runs:
    """Makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)
