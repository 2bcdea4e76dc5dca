"""What the settings say of an exact resume: devices, strategies, what is saved, and plugins that say it themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, ClassVar, Literal

import pytest

from fairlead import (
    CheckpointIOConfigBase,
    CheckpointIOPlugin,
    PluginManager,
    PrecisionConfigBase,
    PrecisionPlugin,
    Resolution,
    StrategyConfigBase,
    StrategyPlugin,
    hookimpl,
)
from fairlead.config import RunConfig
from fairlead.exactness import Verdict, device_reasons, verdict
from fairlead.findings import Inexact
from fairlead.open_union import OpenUnion
from fairlead.testing import FakeEntryPoint, minimal_resolution, stand_ins


class SingleConfig(StrategyConfigBase):
    name: Literal["single_device"] = "single_device"


class Single(StrategyPlugin):
    config = SingleConfig

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterable[Inexact]:
        return ()


class FullConfig(PrecisionConfigBase):
    name: Literal["32-true"] = "32-true"


class Full(PrecisionPlugin):
    config = FullConfig

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterable[Inexact]:
        return ()


class Wrapping(CheckpointIOPlugin):
    """A checkpoint IO that leaves the writing to another one."""

    class Config(CheckpointIOConfigBase):
        name: Literal["wrapping"] = "wrapping"
        inner: Annotated[CheckpointIOConfigBase, OpenUnion("checkpoint_io")]

    config = Config

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterable[Inexact]:
        return ()


class Silent(CheckpointIOPlugin):
    class Config(CheckpointIOConfigBase):
        name: Literal["silent"] = "silent"

    config = Config


class Ring(StrategyPlugin):
    """A strategy of somebody else's; `says` is what its hook does."""

    class Config(StrategyConfigBase):
        name: Literal["ring"] = "ring"

    config = Config
    says: ClassVar[Any] = ()


class SpeakingRing(Ring):
    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterable[Inexact]:
        said = self.says
        if isinstance(said, Exception):
            raise said
        return said() if callable(said) else said  # type: ignore[no-any-return]


def manager(**more: Any) -> PluginManager:
    made = {
        **stand_ins(),
        "strategy.single_device": Single(),
        "precision.32-true": Full(),
        "checkpoint_io.wrapping": Wrapping(),
        "checkpoint_io.silent": Silent(),
        **{key.replace("__", "."): plugin for key, plugin in more.items()},
    }
    return PluginManager([FakeEntryPoint(name, target) for name, target in made.items()])


def said(plugins: PluginManager | None = None, run: dict[str, Any] | None = None, **trainer: Any) -> list[Inexact]:
    plugins = plugins or manager()
    resolution = minimal_resolution(plugins, **trainer)
    return device_reasons(resolution, plugins, RunConfig(**(run or {})))


def test_a_cpu_job_is_exact() -> None:
    assert said() == []
    assert said(max_steps=10, accumulate_grad_batches=4, gradient_clip_val=1.0) == []
    assert said(deterministic="warn", benchmark=True) == [], "a CPU has neither"


@pytest.mark.parametrize(
    ("trainer", "expected", "names"),
    [
        ({"enable_checkpointing": False}, "not exact", "enable_checkpointing"),
        ({"fast_dev_run": True}, "not exact", "fast_dev_run"),
        ({"fast_dev_run": 3}, "not exact", "fast_dev_run"),
        ({"barebones": True}, "not exact", "barebones"),
        ({"checkpoint": {"save_weights_only": True}}, "not exact", "save_weights_only"),
        ({"val_check_interval": "00:10:00"}, "not exact", "val_check_interval"),
        ({"val_check_interval": 0.5}, "exact", ""),
        ({"max_time": "00:10:00"}, "not exact", "max_time"),
        ({"reload_dataloaders_every_n_epochs": 2}, "exact", ""),
        ({"overfit_batches": 2}, "not known", "overfit_batches"),
        ({"lightning_kwargs": {"new_option": 1}}, "not known", "new_option"),
    ],
)
def test_the_trainers_settings(trainer: dict[str, Any], expected: Verdict, names: str) -> None:
    """What the trainer itself decides; devices and strategies speak for themselves."""
    reasons = said(**trainer)
    assert verdict(reasons) == expected, reasons
    assert all(names in reason.what and reason.why and reason.fix for reason in reasons)


def test_every_field_of_the_trainer_was_thought_of() -> None:
    """A new field is exact until somebody looks at it here: so look."""
    from fairlead.config import CheckpointConfig, TrainerConfig

    by_plugin = {
        "accelerator",
        "strategy",
        "precision",
        "environment",
        "checkpoint_io",
        "layer_sync",
        "requeue",
        "loggers",
    }
    inexact = {
        *("deterministic", "benchmark", "enable_checkpointing", "fast_dev_run", "barebones", "checkpoint"),
        *("val_check_interval", "overfit_batches", "lightning_kwargs"),
        "max_time",
    }
    by_sight = {"callbacks", "use_distributed_sampler", "limit_val_batches"}
    by_ranks = {
        "devices",
        "num_nodes",
        "threads",
        "batch_policy",
        "batch_size",
    }  # `explain` says where a run goes on with other ranks
    limits = {"max_epochs", "min_epochs", "max_steps", "min_steps"}
    the_same_each_time = {
        *("plugins", "auto_determine_num_nodes", "limit_train_batches", "limit_test_batches", "limit_predict_batches"),
        *("num_sanity_val_steps", "check_val_every_n_epoch", "log_every_n_steps", "accumulate_grad_batches"),
        "reload_dataloaders_every_n_epochs",
        *("gradient_clip_val", "gradient_clip_algorithm", "sync_batchnorm", "inference_mode", "detect_anomaly"),
        *("profiler", "enable_progress_bar", "progress_interval", "enable_model_summary", "enable_autolog_hparams"),
        "model_registry",
        "max_non_finite",
        *("check_divergence_every_n_steps", "on_divergence", "local_buffers", "check_samples"),
        *("batch_size_from", "base_batch_size", "lr_rule"),
    }
    known = by_plugin | inexact | by_sight | by_ranks | limits | the_same_each_time
    assert set(TrainerConfig.model_fields) == known
    when_and_which = {"every_n_steps", "every_n_epochs", "every_n_minutes", "on_validation", "monitor", "mode"}
    kept = {"keep_last", "keep_best", "keep_every_n_steps"}
    assert set(CheckpointConfig.model_fields) == when_and_which | kept | {"save_weights_only"}


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ({}, "exact"),
        ({"seed": None}, "not exact"),
        ({"resume": "never"}, "exact"),
        ({"resume": "runs/gpt/checkpoints/step-100"}, "exact"),
        ({"resume": "plain.ckpt"}, "not known"),
        ({"ckpt_path": "pretrained.ckpt"}, "exact"),
    ],
)
def test_the_runs_settings(run: dict[str, Any], expected: Verdict) -> None:
    assert verdict(said(run=run)) == expected


REASON = Inexact("the ring", why="it turns", fix="stop it")


def iterated() -> Iterator[Inexact]:
    yield REASON
    raise ZeroDivisionError("oh")


@pytest.mark.parametrize(
    ("says", "expected", "because"),
    [
        ((), "exact", ""),
        ([REASON], "not exact", "it turns"),
        ([dataclasses.replace(REASON, certain=False)], "not known", "it turns"),
        (None, "not known", "does not say"),
        (["no Inexact"], "not known", "gave a str"),
        (ValueError("no"), "not known", "raised ValueError"),
        (iterated, "not known", "raised ZeroDivisionError"),
    ],
)
def test_a_plugin_speaks_for_itself(says: Any, expected: Verdict, because: str) -> None:
    """Third parties say it in `fairlead_exactness`; a hook that fails says nothing that can be relied on."""
    plugin = type("Ring", (SpeakingRing,), {"says": staticmethod(says) if callable(says) else says})()
    reasons = said(manager(strategy__ring=plugin), strategy="ring")
    assert verdict(reasons) == expected, reasons
    assert all(because in reason.why for reason in reasons)


@pytest.mark.parametrize("tag", ["strategy.ring", "precision.32-true", "checkpoint_io.silent"])
def test_a_plugin_without_the_hook_is_never_exact(tag: str) -> None:
    """Fairlead's own as well: nothing is known by name."""
    more: dict[str, Any] = {"strategy__ring": Ring(), "precision__32-true": stand_ins()["precision.32-true"]}
    plugins = manager(**{key: value for key, value in more.items() if key.replace("__", ".") == tag})
    asked: dict[str, Any] = {"strategy": "ring"} if tag == "strategy.ring" else {}
    asked |= {"checkpoint_io": "silent"} if tag == "checkpoint_io.silent" else {}
    assert verdict(said(plugins, **asked)) == "not known"


@pytest.mark.parametrize(("inner", "expected"), [("torch", "exact"), ("silent", "not known")])
def test_a_wrapped_backend_is_asked_too(inner: str, expected: Verdict) -> None:
    assert verdict(said(checkpoint_io={"name": "wrapping", "inner": inner})) == expected


def test_what_is_not_decided_is_not_exact() -> None:
    """A job with errors, such as a plugin that is not installed."""
    plugins = PluginManager([FakeEntryPoint(name, target) for name, target in stand_ins().items()])
    resolution = dataclasses.replace(minimal_resolution(plugins), strategy=None)  # type: ignore[arg-type]  # a gap
    reasons = device_reasons(resolution, plugins)
    assert verdict(reasons) == "not known"
    assert any(reason.what == "the strategy" for reason in reasons)
