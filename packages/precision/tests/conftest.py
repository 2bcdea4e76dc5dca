"""Fixtures of this package's tests."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

import pytest

from fairlead import (
    AcceleratorConfigBase,
    BuildContext,
    CheckpointIOConfigBase,
    Devices,
    EnvironmentConfigBase,
    PluginManager,
    PrecisionConfigBase,
    RequeueConfigBase,
    Resolution,
    StrategyConfigBase,
    Topology,
    TrainerConfig,
)


@pytest.fixture(scope="module")
def plugins() -> PluginManager:
    return PluginManager()


def resolution(
    precision: PrecisionConfigBase, strategy: str = "ddp", accelerator: str = "cpu", names: tuple[str, ...] = ()
) -> Resolution:
    """A resolution of two ranks, without the plugins of other packages."""
    return Resolution(
        settings={},
        trainer=TrainerConfig(),
        topology=Topology(launched=True),
        accelerator=AcceleratorConfigBase(name=accelerator),
        strategy=StrategyConfigBase(name=strategy),
        precision=precision,
        environment=EnvironmentConfigBase(name="torchelastic"),
        checkpoint_io=CheckpointIOConfigBase(name="torch"),
        requeue=RequeueConfigBase(name="none"),
        layer_sync=None,
        loggers=(),
        num_nodes=1,
        devices=2,
        device_indices=None,
        world_size=2,
        device_type=accelerator,
        backend="gloo",
        devices_found=Devices(len(names), "test", names),
        inside_job=True,
        findings=(),
    )


def build(config: PrecisionConfigBase, engine: Any = "trainer", **choices: Any) -> Any:
    plugins = PluginManager()
    runtime = pkgutil.resolve_name(str(plugins.of(config).runtime))
    return runtime(config, BuildContext(resolution(config, **choices), {}, plugins, engine))


@pytest.fixture(name="build")
def _build() -> Callable[..., Any]:
    """`build(config, engine, strategy=, accelerator=)`: what the runtime of a precision returns."""
    return build


@pytest.fixture(name="resolution")
def _resolution() -> Callable[..., Resolution]:
    """`resolution(precision, strategy, accelerator, names)`: as above, for checks."""
    return resolution
