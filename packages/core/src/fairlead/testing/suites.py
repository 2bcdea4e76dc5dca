"""One conformance suite for each axis; an author subclasses the one of the plugin's axis."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pkgutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from fairlead.errors import FairleadError
from fairlead.interfaces import Devices, Requeuer
from fairlead.plugin_classes import CommandPlugin
from fairlead.plugins import PluginManager
from fairlead.testing.checkpoints import CheckpointIOConformance
from fairlead.testing.conformance import EntryPointConformance, PluginConformance, skip
from fairlead.testing.environments import EnvironmentConformance


class AcceleratorConformance(PluginConformance):
    """For plugins of the axis `accelerator`."""

    axis = "accelerator"
    builds: ClassVar[Mapping[str, str]] = {
        "trainer": "lightning.pytorch.accelerators:Accelerator",
        "fabric": "lightning.fabric.accelerators:Accelerator",
    }

    def test_probe_counts_devices(self) -> None:
        """The hook `fairlead_devices` gives a count with its evidence, and leaves the environment alone."""
        results = self.answers("fairlead_devices", Devices)
        assert results, self.broken(
            "it does not implement fairlead_devices, so `accelerator: auto` never takes it",
            "return Devices from it",
        )
        for devices in results:
            assert devices.count >= 0, self.broken(f"it finds {devices.count} devices", "count from 0")
            assert devices.evidence.strip(), self.broken("a count of devices has no evidence", "say how it was found")

    def build(self, run_dir: Path, engine: str = "trainer") -> Any:
        """Builds it where there is such a device."""
        plugins = self.plugins()
        found = plugins.call(self.plugin(plugins), "fairlead_devices", environ=os.environ)
        if not any(isinstance(devices, Devices) and devices.count for devices in found):
            skip(f"{self.key}: this machine has no such device")
        return super().build(run_dir, engine)


class StrategyConformance(PluginConformance):
    """For plugins of the axis `strategy`."""

    axis = "strategy"
    builds: ClassVar[Mapping[str, str]] = {
        "trainer": "lightning.pytorch.strategies:Strategy",
        "fabric": "lightning.fabric.strategies:Strategy",
    }


class PrecisionConformance(PluginConformance):
    """For plugins of the axis `precision`."""

    axis = "precision"
    builds: ClassVar[Mapping[str, str]] = {
        "trainer": "lightning.pytorch.plugins.precision:Precision",
        "fabric": "lightning.fabric.plugins.precision:Precision",
    }


class LayerSyncConformance(PluginConformance):
    """For plugins of the axis `layer_sync`."""

    axis = "layer_sync"
    builds: ClassVar[Mapping[str, str]] = {"trainer": "lightning.pytorch.plugins:LayerSync"}


class RequeueConformance(PluginConformance):
    """For plugins of the axis `requeue`.

    Attributes:
        commands: Names of the programs that it runs, for which stand-ins are put on the PATH; None: that of the job.
    """

    axis = "requeue"
    builds: ClassVar[Mapping[str, str]] = {"trainer": "fairlead.interfaces:Requeuer"}
    commands: ClassVar[Sequence[str] | None] = None

    def test_requeues(self, tmp_path: Path) -> None:
        """`requeue()` says what was done or raises ours: with stand-ins that obey, that refuse, and without any."""
        for name, body in (("obeys", "echo done"), ("refuses", "echo 'not today' >&2; exit 1"), ("missing", None)):
            folder = tmp_path / name
            folder.mkdir()
            # No real scheduler may be queried, also by a requeuer that reads the environment by itself.
            with mock.patch.dict(os.environ, {"PATH": str(folder)}):
                requeuer = self.build(folder / "run")
                for command in () if body is None else self._commands(requeuer):
                    (folder / command).write_text(f"#!/bin/sh\n{body}\n")
                    (folder / command).chmod(0o755)
                answer = self._requeue(requeuer)
            assert isinstance(answer, str), self.broken(
                f"requeue() gave a {type(answer).__name__}", "return what was done, for the history"
            )
            assert answer.strip(), self.broken("requeue() gave an empty text", "return what was done, for the history")

    def test_its_exit_code_is_distinct(self, tmp_path: Path) -> None:
        """`exit_code` is None or a code that says nothing else."""
        code = self.build(tmp_path / "run").exit_code
        assert code is None or (isinstance(code, int) and 3 <= code <= 255 and code not in (130, 143)), self.broken(
            f"its exit_code is {code!r}", "choose 3 to 255, without 130 and 143, which say that no start is wanted"
        )

    def environ(self, plugins: PluginManager | None = None) -> dict[str, str]:
        """The variables of the example, and the PATH with the stand-ins."""
        return {**super().environ(plugins), "PATH": dict(os.environ).get("PATH", os.defpath)}

    def _commands(self, requeuer: Requeuer) -> Sequence[str]:
        if self.commands is not None:
            return self.commands
        return requeuer.job.requeue[:1] if requeuer.job is not None else ()

    def _requeue(self, requeuer: Requeuer) -> object:
        try:
            return requeuer.requeue()
        except FairleadError as error:
            return str(error)
        except Exception as error:
            raise AssertionError(
                self.broken(f"requeue() raised {type(error).__name__}: {error}", "raise fairlead.errors.RunFailedError")
            ) from error


class LoggerConformance(PluginConformance):
    """For plugins of the axis `logger`."""

    axis = "logger"
    builds: ClassVar[Mapping[str, str]] = {"trainer": "lightning.pytorch.loggers:Logger"}
    may_build_nothing = True

    def test_two_steps_are_logged(self, tmp_path: Path) -> None:
        """Settings and the metrics of two steps go in, and it is closed; a position of its is plain data."""
        logger = self.build(tmp_path / "run")
        if logger is None:
            skip(f"{self.key}: nothing has to be built")
        logger.log_hyperparams({"lr": 0.1, "model": {"class": "net:Net"}})
        positions = []
        for step in (1, 2):
            logger.log_metrics({"loss": 1.0 / step, "epoch": 0}, step=step)
            logger.save()
            positions.append(logger.position() if hasattr(logger, "position") else None)
        logger.finalize("success")
        for position in positions:
            assert position is None or json.loads(json.dumps(position, default=repr)) == position, self.broken(
                f"its position is {position!r}",
                "give numbers, texts, lists and dicts: it goes into a checkpoint",
            )
        assert positions[0] is None or positions[0] != positions[1], self.broken(
            f"its position after two steps is that after one, {positions[0]!r}", "write before it answers"
        )


class SubmitterConformance(PluginConformance):
    """For plugins of the axis `submitter`."""

    axis = "submitter"
    builds: ClassVar[Mapping[str, str]] = {"trainer": "fairlead_launch.submission:Submitter"}

    def test_renders_and_asks_without_its_scheduler(self, tmp_path: Path) -> None:
        """A request becomes text, and nothing is written; without its commands a job is refused, and unknown."""
        request, file = pkgutil.resolve_name("fairlead_launch.submission:Request"), tmp_path / "job.yaml"
        run = {"runs": (tmp_path / "a",), "job_texts": ("model: my.model:Net\n",)}
        submission = request("a run's", tmp_path / "1", (file,), **run, cwd=tmp_path, nodes=2, gpus=True)
        with mock.patch.dict(os.environ, {"PATH": str(tmp_path)}):
            submitter = self.build(tmp_path / "run")
            files = submitter.render(submission)
            texts = files and all(isinstance(text, str) and text.strip() for text in files.values())
            assert texts, self.broken(f"render() gave {files!r}", "give the text of each file by its name")
            assert submitter.render(submission) == files, self.broken(
                "render() gave another text", "let it decide nothing"
            )
            assert not (tmp_path / "1").exists(), self.broken("render() wrote something", "leave that to submit()")
            try:
                answer = submitter.submit(submission, [tmp_path / name for name in files])
            except FairleadError as error:
                answer, phase = None, submitter.state("1").phase if str(error).strip() else "refused without a word"
        assert answer is None, self.broken(f"submit() gave {answer!r} without its scheduler", "raise RunFailedError")
        assert phase == "unknown", self.broken(f"state() says {phase!r} without its scheduler", "say unknown")


class CommandConformance(EntryPointConformance):
    """For commands.

    Attributes:
        example: Words with which it runs in an empty folder; None: the command's own `example`.
    """

    axis = "command"
    example: ClassVar[Sequence[str] | None] = None

    def command(self, plugins: PluginManager | None = None) -> CommandPlugin:
        """The command."""
        return (plugins or self.plugins()).command(self.plugin_name)

    def test_is_named_as_its_entry_point(self) -> None:
        """`command.<name>` is the word after `fairlead`, with a line of help."""
        command = self.command()
        assert command.name == self.plugin_name, self.broken(
            f"the command is called {command.name!r}", "give it the name of its entry point"
        )
        assert command.help.strip(), self.broken("it has no help", "say in one line what it does")
        assert "\n" not in command.help, self.broken("its help is not one line", "say in one line what it does")

    def test_arguments_are_described_without_engines(self) -> None:
        """`--help` works on a login node, and describes every argument."""
        command = self.command()
        module = command.arguments.partition(":")[0]
        self.imports_no_engine(module, "import them in what `runtime` names")
        parser = argparse.ArgumentParser(prog=command.name)
        self.load_reference(command.arguments, "arguments")(parser)
        bare = [action.dest for action in parser._actions if not action.help]
        assert not bare, self.broken(f"there is no help for the arguments {', '.join(bare)}", "give each `help=`")

    def test_runtime_is_importable(self) -> None:
        """`runtime` names a callable that exists, once its engine is installed."""
        reference = self.command().runtime
        self.require_engines()
        self.load_reference(reference, "runtime")

    def test_helps_and_runs(self, tmp_path: Path) -> None:
        """`--help` ends with 0; the example ends with 0, or is refused with an error of ours."""
        main = pkgutil.resolve_name("fairlead.cli:main")  # by name: the command line runs these suites, too
        plugins = self.plugins()
        given = self.command(plugins).example if self.example is None else self.example
        assert given is not None, self.broken("there is no example", "set `example` to words that it can be run with")
        self.require_engines()
        for words in (["--help"], list(given)):
            answer = io.StringIO()
            try:
                with contextlib.redirect_stdout(answer):
                    code = main([self.plugin_name, *words, "--debug"], plugins=plugins, cwd=tmp_path)
            except FairleadError as error:
                answer.write(str(error))
                code = 0
            except Exception as error:
                what = f"`{' '.join([self.plugin_name, *words])}` raised {type(error).__name__}: {error}"
                raise AssertionError(self.broken(what, "raise a FairleadError for what a user can meet")) from error
            assert code == 0, self.broken(f"`{' '.join([self.plugin_name, *words])}` ended with {code}", "return 0")
            helped = words != ["--help"] or answer.getvalue().strip()
            assert helped, self.broken("--help prints nothing", "keep argparse's")


class CheckConformance(EntryPointConformance):
    """For checks of every job."""

    axis = "check"

    def test_check_needs_no_engine(self) -> None:
        """It runs on a login node: `check` names a callable, and its module imports no engine."""
        check = self.plugins().check(self.plugin_name)
        module = check.check.partition(":")[0]
        self.imports_no_engine(module, "import them in the function, or do without: it runs on a login node")
        self.load_reference(check.check, "check")

    def test_codes_are_explained(self) -> None:
        """Each code of its findings has an explanation."""
        for code, text in self.plugins().check(self.plugin_name).codes.items():
            assert text.strip(), self.broken(f"the code {code!r} has no explanation", "give it a sentence in `codes`")


CONFORMANCE: dict[str, type[EntryPointConformance]] = {
    suite.axis: suite
    for suite in (
        AcceleratorConformance,
        CheckConformance,
        CheckpointIOConformance,
        CommandConformance,
        EnvironmentConformance,
        LayerSyncConformance,
        LoggerConformance,
        PrecisionConformance,
        RequeueConformance,
        StrategyConformance,
        SubmitterConformance,
    )
}
"""The suite of each axis, to run over all plugins that are installed."""
