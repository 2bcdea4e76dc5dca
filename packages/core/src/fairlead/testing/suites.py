"""One conformance suite for each axis; an author subclasses the one of the plugin's axis."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from fairlead.config_bases import EnvironmentConfigBase
from fairlead.errors import FairleadError
from fairlead.interfaces import Claim, Devices, Job, Setting, Specificity, Topology
from fairlead.plugin_classes import AcceleratorPlugin, CommandPlugin, EnvironmentPlugin
from fairlead.plugins import PluginManager
from fairlead.testing.conformance import EntryPointConformance, PluginConformance, skip
from fairlead.testing.fakes import FakeEnviron


class AcceleratorConformance(PluginConformance):
    """For plugins of the axis `accelerator`."""

    axis = "accelerator"
    builds: ClassVar[Mapping[str, str]] = {
        "trainer": "lightning.pytorch.accelerators:Accelerator",
        "fabric": "lightning.fabric.accelerators:Accelerator",
    }

    def test_probe_counts_devices(self) -> None:
        """The hook `fairlead_devices` gives a count with its evidence, and leaves the environment alone."""
        plugins = self.plugins()
        plugin = self.plugin(plugins)
        assert isinstance(plugin, AcceleratorPlugin)
        environ = FakeEnviron(self.example_environ or {})
        results = plugins.call(plugin, "fairlead_devices", environ=environ)
        assert results, f"{self.key} does not implement fairlead_devices, so `accelerator: auto` never takes it"
        for devices in results:
            assert isinstance(devices, Devices), f"fairlead_devices of {self.key} gave a {type(devices).__name__}"
            assert devices.count >= 0, f"{self.key}: {devices.count} devices"
            assert devices.evidence.strip(), f"{self.key}: a count of devices without evidence"

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


class EnvironmentConformance(PluginConformance):
    """For plugins of the axis `environment`.

    Set `example_environ` to the variables of one rank, so that detection and ranks are tried too.
    """

    axis = "environment"
    builds: ClassVar[Mapping[str, str]] = {"trainer": "lightning.fabric.plugins.environments:ClusterEnvironment"}

    def detect(self, variables: Mapping[str, str]) -> Claim | None:
        """What the plugin claims of these variables."""
        plugins = self.plugins()
        environ, process = FakeEnviron(variables), dict(os.environ)
        results = plugins.call(self.plugin(plugins), "fairlead_detect", environ=environ)
        assert dict(os.environ) == process, f"fairlead_detect of {self.key} changed os.environ"
        for claim in results:
            assert isinstance(claim, Claim), f"fairlead_detect of {self.key} gave a {type(claim).__name__}"
            assert claim.evidence.strip(), f"{self.key}: a claim without evidence"
        return results[0] if results else None

    def test_claims_nothing_without_evidence(self) -> None:
        """No variables, no claim, except that this may be any machine."""
        claim = self.detect({})
        assert claim is None or claim.specificity == Specificity.MACHINE, f"{self.key} claims any process: {claim}"

    def test_claims_its_own(self) -> None:
        """The variables of its example are claimed."""
        if self.example_environ is None:
            skip(f"{self.key}: the suite has no example_environ")
        assert self.detect(self.example_environ or {}), f"{self.key} does not claim its own example_environ"

    def test_topology_is_consistent(self) -> None:
        """Every rank lies within its world, and every value has its reason."""
        if self.example_environ is None:
            skip(f"{self.key}: the suite has no example_environ")
        plugins = self.plugins()
        config = self.config(plugins)
        assert isinstance(config, EnvironmentConfigBase)
        environ = FakeEnviron(self.example_environ or {})
        for topology in plugins.call(self.plugin(plugins), "fairlead_topology", config=config, environ=environ):
            assert isinstance(topology, Topology), f"fairlead_topology of {self.key} gave a {type(topology).__name__}"
            self._check(topology)

    def test_its_job_is_usable(self) -> None:
        """No variables, no job; the example's has an id with its scheduler, and numbers with their reasons."""
        plugins = self.plugins()
        plugin = self.plugin(plugins)
        assert plugins.call(plugin, "fairlead_job", environ=FakeEnviron()) == [], f"{self.key}: a job without variables"
        for job in plugins.call(plugin, "fairlead_job", environ=FakeEnviron(self.example_environ or {})):
            assert isinstance(job, Job), f"fairlead_job of {self.key} gave a {type(job).__name__}"
            scheduler, _, name = job.id.partition(":")
            assert all((scheduler, name)), f"{self.key}: the job's id {job.id!r} is not `scheduler:id`"
            for cpus in (job.cpus_per_rank, job.cpus_on_node):
                assert cpus is None or (cpus.value > 0 and cpus.reason), f"{self.key}: {cpus!r} is no number of CPUs"

    def test_names_its_requeuer(self) -> None:
        """`requeue` is the tag of a requeuer."""
        plugin = self.plugin()
        assert isinstance(plugin, EnvironmentPlugin)
        assert plugin.requeue, f"{self.key}: `requeue` is empty; the default is 'none'"

    def _check(self, topology: Topology) -> None:
        number: dict[str, int] = {}
        for name in Topology.__dataclass_fields__:
            setting = getattr(topology, name)
            if name in {"launched", "start"} or setting is None:
                continue
            assert isinstance(setting, Setting), f"{self.key}: {name} is {setting!r}, not a Setting with its reason"
            assert setting.reason.strip(), f"{self.key}: {name} has no reason"
            if name != "main_address":
                assert isinstance(setting.value, int), f"{self.key}: {name} is {setting.value!r}, not a number"
                number[name] = setting.value
        for rank, size in (
            ("global_rank", "world_size"),
            ("local_rank", "local_world_size"),
            ("node_rank", "num_nodes"),
        ):
            if rank in number:
                limit = number.get(size, number[rank] + 1)
                assert 0 <= number[rank] < limit, f"{self.key}: {rank} is {number[rank]}, {size} is {limit}"
        if {"world_size", "local_world_size"} <= number.keys():
            assert number["local_world_size"] <= number["world_size"], f"{self.key}: more ranks on a node than in all"


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
        assert path.exists(), f"{self.key}: no checkpoint at its path after the save"
        loaded = io.load_checkpoint(path)
        _same(loaded, self.state(), self.key)
        io.remove_checkpoint(path)
        io.teardown()  # a backend that works in the background may remove there
        assert not path.exists(), f"{self.key}: the checkpoint is still there after remove_checkpoint and teardown"

    def test_a_missing_checkpoint_is_named(self, tmp_path: Path) -> None:
        """Loading what is not there raises a `FairleadError` that names the path."""
        io = self.build(tmp_path / "run")
        path = tmp_path / "no-such.ckpt"
        said = None
        try:
            io.load_checkpoint(path)
        except FairleadError as error:
            said = str(error)
        finally:
            io.teardown()
        assert said is not None, f"{self.key}: loading a checkpoint that does not exist gave something"
        assert "no-such.ckpt" in said, f"{self.key}: the error does not name the path: {said}"


class LayerSyncConformance(PluginConformance):
    """For plugins of the axis `layer_sync`."""

    axis = "layer_sync"
    builds: ClassVar[Mapping[str, str]] = {"trainer": "lightning.pytorch.plugins:LayerSync"}


class RequeueConformance(PluginConformance):
    """For plugins of the axis `requeue`."""

    axis = "requeue"
    builds: ClassVar[Mapping[str, str]] = {"trainer": "fairlead.interfaces:Requeuer"}


class LoggerConformance(PluginConformance):
    """For plugins of the axis `logger`."""

    axis = "logger"
    builds: ClassVar[Mapping[str, str]] = {"trainer": "lightning.pytorch.loggers:Logger"}
    may_build_nothing = True


class CommandConformance(EntryPointConformance):
    """For commands."""

    axis = "command"

    def command(self, plugins: PluginManager | None = None) -> CommandPlugin:
        """The command."""
        return (plugins or self.plugins()).command(self.plugin_name)

    def test_is_named_as_its_entry_point(self) -> None:
        """`command.<name>` is the word after `fairlead`, with a line of help."""
        command = self.command()
        assert command.name == self.plugin_name, f"{self.key}: the command is called {command.name!r}"
        assert command.help.strip(), f"{self.key}: no help"
        assert "\n" not in command.help, f"{self.key}: the help is not one line"

    def test_arguments_are_described_without_engines(self) -> None:
        """`--help` works on a login node, and describes every argument."""
        command = self.command()
        module = command.arguments.partition(":")[0]
        imported = self.imports(f"import {module}", module)
        assert not imported, f"{self.key}: its arguments import {', '.join(imported)}"
        parser = argparse.ArgumentParser(prog=command.name)
        self.load_reference(command.arguments, "arguments")(parser)
        bare = [action.dest for action in parser._actions if not action.help]
        assert not bare, f"{self.key}: no help for the arguments {', '.join(bare)}"

    def test_runtime_is_importable(self) -> None:
        """`runtime` names a callable that exists, once its engine is installed."""
        reference = self.command().runtime
        self.require_engines()
        self.load_reference(reference, "runtime")


class CheckConformance(EntryPointConformance):
    """For checks of every job."""

    axis = "check"

    def test_check_needs_no_engine(self) -> None:
        """It runs on a login node: `check` names a callable, and its module imports no engine."""
        check = self.plugins().check(self.plugin_name)
        module = check.check.partition(":")[0]
        imported = self.imports(f"import {module}", module)
        assert not imported, f"{self.key}: it imports {', '.join(imported)}"
        self.load_reference(check.check, "check")

    def test_codes_are_explained(self) -> None:
        """Each code of its findings has an explanation."""
        for code, text in self.plugins().check(self.plugin_name).codes.items():
            assert text.strip(), f"{self.key}: the code {code!r} has no explanation"


def _same(got: Any, wanted: Any, key: str, path: str = "checkpoint") -> None:
    assert type(got) is type(wanted), f"{key}: {path} came back as a {type(got).__name__}"
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys(), f"{key}: {path} came back with the keys {sorted(got)}"
        for name in wanted:
            _same(got[name], wanted[name], key, f"{path}[{name!r}]")
    elif hasattr(wanted, "tolist"):
        assert got.dtype == wanted.dtype, f"{key}: {path} came back as {got.dtype}"
        assert got.tolist() == wanted.tolist(), f"{key}: {path} came back changed"
    else:
        assert got == wanted, f"{key}: {path} came back as {got!r}"


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
    )
}
"""The suite of each axis, to run over all plugins that are installed."""
