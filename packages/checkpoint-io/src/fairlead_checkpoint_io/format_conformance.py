"""What `fairlead.testing` asks of a checkpoint format: that the commands of `fairlead checkpoint` take it."""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fairlead.cli.session import Session
from fairlead.errors import FairleadError
from fairlead.plugins import PluginManager
from fairlead_checkpoint_io.checkpoint_format import CheckpointFormat, format_of, known_formats
from fairlead_checkpoint_io.commands.checkpoint import checkpoint_arguments, run_checkpoint

_RECOGNISE = "have `fits` go by what only this format has: a name in the folder, or the first bytes"


def problems(
    form: CheckpointFormat, state: Mapping[str, Any], plugins: PluginManager, folder: Path
) -> Iterator[tuple[str, str]]:
    """What a user cannot do with a format, and what its author should do; tried in an empty folder."""
    tried = _Tried(form, plugins, folder)
    yield from tried.its_place()
    if form.write is not None:
        yield from tried.there_and_back(state)
        yield from tried.damage()


class _Tried:
    """One format, with which commands are run in a folder."""

    def __init__(self, form: CheckpointFormat, plugins: PluginManager, folder: Path) -> None:
        self._form, self._plugins, self._folder = form, plugins, folder
        self._known = known_formats(self._session())

    def its_place(self) -> Iterator[tuple[str, str]]:
        """It is known by its name, and takes nothing that is somebody else's."""
        if self._form not in self._known:
            yield f"another format is called {self._form.name!r} too, and is taken", "give yours another name"
        (self._folder / "empty").mkdir(parents=True)
        (self._folder / "text").write_text("no checkpoint\n")
        (self._folder / "nothing").touch()
        for name in ("empty", "text", "nothing", "."):
            try:
                taken = self._form.fits(self._folder / name)
            except Exception as error:  # it is asked of every path that a user names
                yield f"`fits` raises {type(error).__name__} for what is none: {error}", "return False"
            else:
                if taken:
                    yield f"`fits` takes {'a folder' if name in ('empty', '.') else 'a file'} that is none", _RECOGNISE

    def there_and_back(self, state: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """What is converted to it is recognised, verified, listed and overwritten, and comes back as it was."""
        import torch

        name, weights = self._form.name, ["--weights"] if self._form.weights_only else []
        torch.save(state, self._folder / "source.ckpt")
        if (of := format_of(self._folder / "source.ckpt", self._known)) is not self._form and of.name != "torch":
            yield f"`fits` takes a file of torch.save: `{of.name}`", _RECOGNISE
        # In a run the file or folder is called state.ckpt, so a suffix says nothing.
        for more in ([], ["--overwrite"]):
            yield from self._must(["convert", "source.ckpt", "there.ckpt", "--to", name, *more], "see to `write`")
            found = [one.name for one in self._known if one.fits(self._folder / "there.ckpt")][:1]
            if found != [name]:
                yield f"what it wrote is taken for {found[0] if found else 'no checkpoint'}", _RECOGNISE
        if self._form.verify is not None:
            yield from self._must(["verify", "there.ckpt"], "see to `verify`")
        yield from self._must(["ls", "."], _RECOGNISE)
        yield from self._must(["convert", "there.ckpt", "back.ckpt", "--to", "torch", *weights], "see to `read`")
        same = "let `read` give what `write` was given, or let `write` name what it leaves out"
        for other in ("back.ckpt", "there.ckpt"):
            yield from self._must(["diff", "source.ckpt", other, *weights], same)

    def damage(self) -> Iterator[tuple[str, str]]:
        """Half of a file, as a full disk leaves it, is no checkpoint to any command."""
        path = self._folder / "there.ckpt"
        files = [one for one in (path.rglob("*") if path.is_dir() else [path]) if one.is_file()]
        largest = max(files, key=lambda one: one.stat().st_size)
        largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
        for words in (["verify", "there.ckpt"], ["convert", "there.ckpt", "half.ckpt", "--to", "torch"]):
            if words[0] == "verify" and self._form.verify is None:
                continue
            code, output = self._run(words)
            if code == 0:
                do = f"compare a size or a checksum in `{'read' if words[0] == 'convert' else 'verify'}`"
                yield f"{largest.name} was cut in half, and `{words[0]}` takes it: {output}", do

    def _must(self, words: list[str], do: str) -> Iterator[tuple[str, str]]:
        code, output = self._run(words)
        if code:
            yield f"`fairlead checkpoint {' '.join(words)}` ended with {code}: {output}", do

    def _run(self, words: list[str]) -> tuple[int, str]:
        parser, session = argparse.ArgumentParser(), self._session()
        checkpoint_arguments(parser)
        try:
            code = run_checkpoint(parser.parse_args(words), session)
        except FairleadError as error:
            return error.exit_code, str(error)
        except Exception as error:  # as the command line shows a defect
            return 1, f"{type(error).__name__}: {error}"
        return code, "; ".join(f"{session.stdout.getvalue()}{session.stderr.getvalue()}".strip().splitlines())  # type: ignore[attr-defined]  # ours

    def _session(self) -> Session:
        return Session(self._plugins, {}, self._folder, stdout=io.StringIO(), stderr=io.StringIO())
