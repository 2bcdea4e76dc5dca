"""The capability table, and plugins that fail or whose engine is missing: in the way only where they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

from fairlead import (
    AcceleratorConfigBase,
    AcceleratorPlugin,
    Capability,
    Claim,
    Devices,
    EnvironmentConfigBase,
    EnvironmentPlugin,
    Finding,
    LoggerConfigBase,
    LoggerPlugin,
    PluginManager,
    Resolution,
    StrategyConfigBase,
    StrategyPlugin,
    TrainerConfig,
    hookimpl,
)
from fairlead.capabilities import check_capabilities
from fairlead.checks import check_trainer
from fairlead.testing import FakeEnviron, stand_ins


class CUDAAcceleratorConfig(AcceleratorConfigBase):
    """A GPU."""

    name: Literal["cuda"] = "cuda"


class CUDA(AcceleratorPlugin):
    """GPUs, as many as FAKE_GPUS says."""

    config = CUDAAcceleratorConfig
    priority = 10
    backend = "nccl"

    @hookimpl
    def fairlead_devices(self, environ: Mapping[str, str]) -> Devices:
        """Counts them."""
        count = int(environ.get("FAKE_GPUS", "0"))
        return Devices(count, "FAKE_GPUS", ("H100",) * count)


def resolve(plugins: PluginManager, environ: Mapping[str, str] | None = None, **trainer: Any) -> Resolution:
    """Resolves and checks a trainer; `findings` holds both."""
    resolution, findings = check_trainer(TrainerConfig(**trainer), environ=FakeEnviron(environ or {}), plugins=plugins)
    object.__setattr__(resolution, "findings", tuple(findings))
    return resolution


def codes(resolution: Resolution) -> list[tuple[str, str]]:
    """Severity and code of each finding, without the one of every scheduler's job until signals are handled."""
    return [(f.severity, f.code) for f in resolution.findings]


class BadEnvironmentConfig(EnvironmentConfigBase):
    """Bad."""

    name: Literal["bad"] = "bad"


class Bad(EnvironmentPlugin):
    """Fails in every hook, in every way."""

    config = BadEnvironmentConfig

    @hookimpl
    def fairlead_detect(self, environ: Mapping[str, str]) -> Claim | None:
        """Fails."""
        raise KeyError("X")

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """Fails while it is iterated."""
        yield Capability("strategy.ddp", ("accelerator.mps",), "no", "no")
        raise RuntimeError("in the middle")

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
        """Gives something else."""
        yield "not a finding"  # type: ignore[misc]  # what is tested


def test_a_broken_plugin_that_nobody_uses_is_a_warning(fairlead_plugins: Callable[..., PluginManager]) -> None:
    """Rule 9: it is never in the way."""
    resolution = resolve(fairlead_plugins(stand_ins(), Bad()))
    assert resolution.value("environment") == "lightning"
    assert codes(resolution) == [("warning", "plugin-broken")] * 2
    assert [f.where for f in resolution.findings] == ["the plugin environment.bad"] * 2
    assert "fairlead_detect of environment.bad raised KeyError" in resolution.findings[0].what
    assert "fairlead_capabilities of environment.bad raised RuntimeError" in resolution.findings[1].what


def test_a_broken_plugin_that_is_used_is_an_error(fairlead_plugins: Callable[..., PluginManager]) -> None:
    resolution = resolve(fairlead_plugins(stand_ins(), Bad()), environment="bad")
    errors = [f for f in resolution.findings if f.severity == "error"]
    assert [(f.code, f.what) for f in errors] == [
        ("plugin-broken", "fairlead_check of environment.bad gave a str, not a Finding")
    ]


class NoProbe(CUDA):
    """A probe that fails."""

    @hookimpl
    def fairlead_devices(self, environ: Mapping[str, str]) -> Devices:
        """Fails."""
        raise OSError("nvidia-smi: driver mismatch")


def test_a_probe_that_fails_leaves_the_cpu(fairlead_plugins: Callable[..., PluginManager]) -> None:
    plugins = fairlead_plugins(stand_ins(), NoProbe())
    auto = resolve(plugins)
    assert (auto.value("accelerator"), codes(auto)) == ("cpu", [("warning", "plugin-broken")])
    assert ("error", "plugin-broken") in codes(resolve(plugins, accelerator="cuda"))


class NeedyStrategyConfig(StrategyConfigBase):
    """Needs much."""

    name: Literal["needy"] = "needy"


class Needy(StrategyPlugin):
    """Needs an engine, and a GPU."""

    config = NeedyStrategyConfig
    engines = ("no-such-engine>=2",)

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """It knows what it cannot."""
        return [
            Capability(
                "strategy.needy", ("accelerator.cpu", "accelerator.mps"), "no", "it needs a GPU", "accelerator: cuda"
            ),
            Capability("strategy.needy", ("clipping.value",), "partial", "only on rank 0"),
            Capability("strategy.needy", ("precision.32-true",), "yes", "tested"),
        ]


class NeedyLoggerConfig(LoggerConfigBase):
    """Needs an engine."""

    name: Literal["needy"] = "needy"


class NeedyLogger(LoggerPlugin):
    """Needs an engine."""

    config = NeedyLoggerConfig
    engines = ("no-such-logger",)


def test_missing_engines_have_their_pip_lines(fairlead_plugins: Callable[..., PluginManager]) -> None:
    """Rule 10; on a login node without torch they are to be expected."""
    plugins = fairlead_plugins(stand_ins(), Needy(), NeedyLogger(), CUDA())
    trainer = TrainerConfig(strategy="needy", loggers=("needy",))
    for purpose, severity in (("run", "error"), ("check", "error" if plugins.is_installed("torch") else "info")):
        _, found = check_trainer(trainer, environ={"FAKE_GPUS": "1"}, plugins=plugins, purpose=purpose)  # type: ignore[arg-type]  # both are purposes
        assert [(f.severity, f.where, f.fix) for f in found if f.code == "plugin-missing"] == [
            (severity, "trainer.strategy", "pip install 'no-such-engine>=2'"),
            (severity, "trainer.loggers[0]", "pip install 'no-such-logger'"),
        ]


def test_the_capability_table_stops_what_does_not_fit(fairlead_plugins: Callable[..., PluginManager]) -> None:
    plugins = fairlead_plugins(stand_ins(), Needy())
    resolution = resolve(plugins, strategy="needy", gradient_clip_val=1.0, gradient_clip_algorithm="value")
    found = {(f.severity, f.what, f.where, f.why) for f in resolution.findings if f.code == "capability"}
    assert found == {
        ("error", "strategy 'needy' does not work with accelerator 'cpu'", "trainer.strategy", "it needs a GPU"),
        (
            "warning",
            "strategy 'needy' works only partly with gradient clipping by value",
            "trainer.strategy, trainer.gradient_clip_val",
            "only on rank 0",
        ),
    }


def test_capability_rows_of_one_choice_are_said_once() -> None:
    row = Capability("strategy.x", ("accelerator.cpu",), "no", "reason")
    assert len(check_capabilities([row, row], {"strategy.x": None, "accelerator.cpu": None})) == 1
    assert check_capabilities([row], {"strategy.x": None}) == []


def test_a_pair_of_which_both_plugins_have_a_row_is_said_once() -> None:
    """In the words of the first; that it works only partly, besides, is another thing."""
    rows = [
        Capability("strategy.a", ("checkpoint_io.b",), "no", "a takes its own"),
        Capability("checkpoint_io.b", ("strategy.a",), "no", "b is another's"),
        Capability("checkpoint_io.b", ("strategy.a",), "partial", "slow"),
    ]
    chosen = {"strategy.a": "trainer.strategy", "checkpoint_io.b": None}
    assert [(f.severity, f.why) for f in check_capabilities(rows, chosen)] == [
        ("error", "a takes its own"),
        ("warning", "slow"),
    ]
