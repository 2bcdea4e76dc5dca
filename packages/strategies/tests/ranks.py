"""Stand-ins that the tests of this package build strategies with."""

from __future__ import annotations

from typing import Any

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


def resolution(strategy: StrategyConfigBase, **changes: Any) -> Resolution:
    """A resolution of two CPU ranks, without the plugins of other packages."""
    asked = getattr(strategy, "process_group_backend", "auto")
    fields: dict[str, Any] = {
        "settings": {},
        "trainer": TrainerConfig(),
        "topology": Topology(launched=True),
        "accelerator": AcceleratorConfigBase(name="cpu"),
        "strategy": strategy,
        "precision": PrecisionConfigBase(name="32-true"),
        "environment": EnvironmentConfigBase(name="torchelastic"),
        "checkpoint_io": CheckpointIOConfigBase(name="torch"),
        "requeue": RequeueConfigBase(name="none"),
        "layer_sync": None,
        "loggers": (),
        "num_nodes": 1,
        "devices": 2,
        "device_indices": None,
        "world_size": 2,
        "device_type": "cpu",
        "backend": "gloo" if asked == "auto" else asked,
        "devices_found": Devices(2, "test", unlimited=True),
        "inside_job": True,
        "findings": (),
    }
    return Resolution(**{**fields, **changes})


def context(strategy: StrategyConfigBase, engine: Any = "trainer", **changes: Any) -> BuildContext:
    """The context a runtime is built with."""
    return BuildContext(resolution(strategy, **changes), {}, PluginManager([]), engine)
