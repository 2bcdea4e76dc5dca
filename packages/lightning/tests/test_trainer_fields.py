"""Every field of `TrainerConfig` reaches Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ModelSummary, Timer
from lightning.pytorch.callbacks.progress import ProgressBar
from lightning.pytorch.plugins import MixedPrecision, TorchSyncBatchNorm
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from tiny_job import Data, Line, apart, events, latest, metric_rows

from fairlead import ClassSpec, RunConfig, Trainer, TrainerConfig
from fairlead.config import CheckpointConfig
from fairlead_lightning.build import PASSED_ON
from fairlead_runs.batch_size import batch_plan

Check = Callable[[Trainer, Path], None]


class Named(Callback):
    """A callback with an argument, for the field `callbacks`."""

    def __init__(self, text: str) -> None:
        self.text = text


class Timed(SimpleProfiler):
    """A profiler of the user's."""


def settings(**config: Any) -> TrainerConfig:
    return TrainerConfig.model_validate({"accelerator": "cpu", "devices": 1, **config})


def build(config: TrainerConfig, root: Path) -> Trainer:
    return Trainer(config, run=RunConfig(name="run", dir=str(root)))


def has(path: str, value: Any) -> Check:
    """The attribute of the trainer at a dotted path equals a value."""

    def check(trainer: Trainer, root: Path) -> None:
        found: Any = trainer
        for name in path.split("."):
            found = getattr(found, name)
        assert found == value

    return check


def computes_with(threads: int) -> Check:
    """Torch takes that many threads; they are the process's, so the other tests get theirs back."""
    before = torch.get_num_threads()

    def check(trainer: Trainer, root: Path) -> None:
        found = torch.get_num_threads()
        torch.set_num_threads(before)
        assert found == threads

    return check


def isa(path: str, kind: type) -> Check:
    def check(trainer: Trainer, root: Path) -> None:
        found: Any = trainer
        for name in path.split("."):
            found = getattr(found, name)
        assert isinstance(found, kind)

    return check


def all_of(*checks: Check) -> Check:
    def check(trainer: Trainer, root: Path) -> None:
        for one in checks:
            one(trainer, root)

    return check


def callbacks(kind: type, count: int) -> Check:
    def check(trainer: Trainer, root: Path) -> None:
        assert sum(isinstance(c, kind) for c in vars(trainer)["callbacks"]) == count

    return check


def determinism(enabled: bool, warn_only: bool) -> Check:
    def check(trainer: Trainer, root: Path) -> None:
        assert torch.are_deterministic_algorithms_enabled() is enabled
        assert torch.is_deterministic_algorithms_warn_only_enabled() is warn_only

    return check


def saved(trainer: Trainer, root: Path) -> None:
    trainer.fit(Line(), datamodule=Data())
    assert [e["step"] for e in events(root / "run", "checkpoint")] == [2, 3]


def began_with(rate: float) -> Check:
    """The learning rate before any schedule moves it; the model says 0.05, the batch is 4."""

    def check(trainer: Trainer, root: Path) -> None:
        trainer.fit(Line(), datamodule=Data())
        assert trainer.optimizers[0].param_groups[0]["initial_lr"] == rate

    return check


def not_saved(trainer: Trainer, root: Path) -> None:
    trainer.fit(Line(), datamodule=Data())
    assert events(root / "run", "checkpoint") == []


def also_in_tensorboard(trainer: Trainer, root: Path) -> None:
    trainer.fit(Line(), datamodule=Data())
    assert list(root.rglob("events.out.tfevents*"))
    assert metric_rows(root / "run")


def text_of_the_callback(trainer: Trainer, root: Path) -> None:
    # Pytest has imported this file under another name, so the class is another one.
    (one,) = [c for c in vars(trainer)["callbacks"] if type(c).__name__ == "Named"]
    assert one.text == "hello"


def kept_global(trainer: Trainer, root: Path) -> None:
    before = {"world_size": 4, "accumulate_grad_batches": 2}
    assert batch_plan(trainer.resolution, before) == 8


def max_time(trainer: Trainer, root: Path) -> None:
    (timer,) = [c for c in vars(trainer)["callbacks"] if isinstance(c, Timer)]
    assert timer.time_remaining() == 36 * 3600.0


def requeuer(trainer: Trainer, root: Path) -> None:
    assert trainer.resolution.requeue.name == "none"


def lightning_environment(trainer: Trainer, root: Path) -> None:
    environment = trainer.strategy.cluster_environment  # type: ignore[attr-defined]
    assert type(environment).__name__ == "ResolvedEnvironment"
    assert not environment.creates_processes_externally  # Lightning is to start rank 1


def two_ddp_ranks(trainer: Trainer, root: Path) -> None:
    assert trainer.num_devices == 2
    assert isinstance(trainer.strategy, DDPStrategy)


QUICK: dict[str, Any] = {
    "max_steps": 3,
    "limit_val_batches": 0,
    "log_every_n_steps": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
HERE = "test_trainer_fields"

EXPECTED: dict[str, list[tuple[dict[str, Any], Check]]] = {
    "accelerator": [({"accelerator": "cpu"}, isa("accelerator", L.accelerators.CPUAccelerator))],
    "strategy": [
        ({"strategy": "single_device"}, isa("strategy", SingleDeviceStrategy)),
        ({"strategy": "ddp", "devices": 2}, isa("strategy", DDPStrategy)),
        ({"devices": 2}, two_ddp_ranks),
    ],
    "precision": [
        ({"precision": "bf16-mixed"}, all_of(has("precision", "bf16-mixed"), isa("precision_plugin", MixedPrecision))),
        ({"precision": "64-true"}, has("precision", "64-true")),
    ],
    "environment": [({"environment": "lightning", "devices": 2}, lightning_environment)],
    "checkpoint_io": [
        ({"checkpoint_io": "async"}, has("strategy.checkpoint_io.__class__.__name__", "AsyncFileCheckpointIO"))
    ],
    "layer_sync": [
        ({"layer_sync": "torch_sync_batchnorm", "devices": 2}, isa("strategy._layer_sync", TorchSyncBatchNorm))
    ],
    "requeue": [({"requeue": "none"}, requeuer)],
    "loggers": [({**QUICK, "loggers": ["tensorboard"]}, also_in_tensorboard)],
    "plugins": [
        (
            {"plugins": [{"name": "precision.64-true"}, {"name": "checkpoint_io.async"}]},
            all_of(
                has("precision", "64-true"), has("strategy.checkpoint_io.__class__.__name__", "AsyncFileCheckpointIO")
            ),
        )
    ],
    "devices": [
        ({"devices": 2}, two_ddp_ranks),
        ({"devices": [0, 1]}, two_ddp_ranks),
        ({"devices": "auto"}, has("num_devices", 1)),
        ({"devices": -1}, has("num_devices", 1)),
    ],
    "num_nodes": [({"num_nodes": 1}, has("num_nodes", 1)), ({"num_nodes": "auto"}, has("num_nodes", 1))],
    "max_non_finite": [
        ({"max_non_finite": 3}, has("fit_callback.finite.most", 3)),
        ({"max_non_finite": None}, has("fit_callback.finite.most", None)),
    ],
    "check_divergence_every_n_steps": [
        ({"check_divergence_every_n_steps": 5}, has("fit_callback.replicas.steps", 5)),
        ({"check_divergence_every_n_steps": None}, has("fit_callback.replicas.steps", None)),
    ],
    "on_divergence": [
        ({"on_divergence": "warning"}, has("fit_callback.replicas.check.on_divergence", "warning")),
        ({"on_divergence": "error"}, has("fit_callback.replicas.check.on_divergence", "error")),
    ],
    "check_samples": [({"check_samples": False}, has("fit_callback.samples", None))],
    "local_buffers": [({"local_buffers": ["a.*"]}, has("fit_callback.replicas.local_buffers", ["a.*"]))],
    "threads": [({"threads": 1}, computes_with(1)), ({"threads": 3}, computes_with(3))],
    "auto_determine_num_nodes": [({"auto_determine_num_nodes": False}, has("num_nodes", 1))],
    "max_epochs": [({"max_epochs": 7}, has("max_epochs", 7)), ({"max_epochs": -1}, has("max_epochs", -1))],
    "min_epochs": [({"min_epochs": 2}, has("min_epochs", 2))],
    "max_steps": [({"max_steps": 9}, has("max_steps", 9))],
    "min_steps": [({"min_steps": 4}, has("min_steps", 4))],
    "max_time": [({"max_time": "1-12:00:00"}, max_time)],
    "fast_dev_run": [
        ({"fast_dev_run": 3}, all_of(has("fast_dev_run", 3), has("max_steps", 3), has("limit_val_batches", 3))),
        ({"fast_dev_run": True}, has("max_steps", 1)),
    ],
    "limit_train_batches": [
        ({"limit_train_batches": 5}, has("limit_train_batches", 5)),
        ({"limit_train_batches": 0.5}, has("limit_train_batches", 0.5)),
    ],
    "limit_val_batches": [({"limit_val_batches": 0}, has("limit_val_batches", 0))],
    "limit_test_batches": [({"limit_test_batches": 0.25}, has("limit_test_batches", 0.25))],
    "limit_predict_batches": [({"limit_predict_batches": 2}, has("limit_predict_batches", 2))],
    "overfit_batches": [
        ({"overfit_batches": 2}, all_of(has("overfit_batches", 2), has("limit_train_batches", 2))),
        ({"overfit_batches": 0.5}, has("limit_train_batches", 0.5)),
    ],
    "num_sanity_val_steps": [
        ({"num_sanity_val_steps": 1}, has("num_sanity_val_steps", 1)),
        ({"num_sanity_val_steps": -1}, has("num_sanity_val_steps", float("inf"))),
    ],
    "val_check_interval": [
        ({"val_check_interval": 5}, has("val_check_interval", 5)),
        ({"val_check_interval": 0.5}, has("val_check_interval", 0.5)),
        ({"val_check_interval": "00:10:00"}, has("_val_check_time_interval", 600.0)),
    ],
    "check_val_every_n_epoch": [
        ({"check_val_every_n_epoch": 3}, has("check_val_every_n_epoch", 3)),
        ({"check_val_every_n_epoch": None, "val_check_interval": 5}, has("check_val_every_n_epoch", None)),
    ],
    "log_every_n_steps": [({"log_every_n_steps": 7}, has("log_every_n_steps", 7))],
    "reload_dataloaders_every_n_epochs": [
        ({"reload_dataloaders_every_n_epochs": 2}, has("reload_dataloaders_every_n_epochs", 2))
    ],
    "accumulate_grad_batches": [({"accumulate_grad_batches": 4}, has("accumulate_grad_batches", 4))],
    "gradient_clip_val": [({"gradient_clip_val": 0.5}, has("gradient_clip_val", 0.5))],
    "gradient_clip_algorithm": [
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, has("gradient_clip_algorithm.value", "value"))
    ],
    "batch_policy": [({"batch_policy": "keep_global"}, kept_global)],
    # A job's alone; `test_batch_rule` and `integration_tests/test_batch_and_rate.py` have one.
    "batch_size": [({"batch_size": "per_device"}, has("fit_callback.batch.total", None))],
    "batch_size_from": [({"batch_size_from": "model.args.batch"}, has("fit_callback.batch.total", None))],
    "base_batch_size": [({**QUICK, "base_batch_size": 2}, began_with(0.05 * 4 / 2))],
    "lr_rule": [({**QUICK, "base_batch_size": 1, "lr_rule": "sqrt"}, began_with(0.05 * 4**0.5))],
    "sync_batchnorm": [
        (
            {"sync_batchnorm": True, "devices": 2},
            has("strategy._layer_sync.__class__.__name__", "CPUSyncBatchNormLayerSync"),
        )
    ],
    "use_distributed_sampler": [
        ({"use_distributed_sampler": False}, has("_accelerator_connector.use_distributed_sampler", False))
    ],
    "deterministic": [
        ({"deterministic": True}, determinism(True, False)),
        ({"deterministic": "warn"}, determinism(True, True)),
        ({"deterministic": False}, determinism(False, False)),
    ],
    "benchmark": [({"benchmark": True}, lambda trainer, root: _equal(torch.backends.cudnn.benchmark, True))],
    "inference_mode": [({"inference_mode": False}, has("validate_loop.inference_mode", False))],
    "detect_anomaly": [({"detect_anomaly": True}, has("_detect_anomaly", True))],
    "barebones": [({"barebones": True}, all_of(has("barebones", True), callbacks(ProgressBar, 0)))],
    "callbacks": [({"callbacks": [{"class": f"{HERE}:Named", "args": {"text": "hello"}}]}, text_of_the_callback)],
    "profiler": [
        ({"profiler": "simple"}, isa("profiler", SimpleProfiler)),
        ({"profiler": "advanced"}, isa("profiler", AdvancedProfiler)),
        ({"profiler": "pytorch"}, isa("profiler", PyTorchProfiler)),
        ({"profiler": f"{HERE}:Timed"}, lambda trainer, root: _equal(type(trainer.profiler).__name__, "Timed")),  # type: ignore[attr-defined]
    ],
    "checkpoint": [({**QUICK, "checkpoint": {"every_n_steps": 2}}, saved)],
    "enable_checkpointing": [({**QUICK, "enable_checkpointing": False}, not_saved)],
    "enable_progress_bar": [
        ({"enable_progress_bar": True}, callbacks(ProgressBar, 1)),
        ({"enable_progress_bar": False}, callbacks(ProgressBar, 0)),
    ],
    "progress_interval": [({"progress_interval": 3.5}, has("progress_bar_callback.interval", 3.5))],
    "enable_model_summary": [
        ({"enable_model_summary": True}, callbacks(ModelSummary, 1)),
        ({"enable_model_summary": False}, callbacks(ModelSummary, 0)),
    ],
    "enable_autolog_hparams": [({"enable_autolog_hparams": False}, has("enable_autolog_hparams", False))],
    "model_registry": [({"model_registry": "me/model"}, has("_model_registry", "me/model"))],
    "lightning_kwargs": [({"lightning_kwargs": {}}, has("num_nodes", 1))],
}


def _equal(found: object, wanted: object) -> None:
    assert found == wanted


@pytest.fixture(autouse=True)
def _process_wide_switches() -> Iterator[None]:
    """Lightning sets switches of torch for the whole process; tests must not inherit them."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
    )
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch.backends.cudnn.benchmark = before[2]


CASES = [
    pytest.param(config, check, id=f"{field}-{index}")
    for field, expected in EXPECTED.items()
    for index, (config, check) in enumerate(expected)
]


@pytest.mark.parametrize("field", sorted(TrainerConfig.model_fields))
def test_every_field_has_an_expectation(field: str) -> None:
    """A new field fails here until this file says what it does to Lightning."""
    assert EXPECTED.get(field)
    assert all(field in config for config, _ in EXPECTED[field] if field != "strategy")


def test_no_expectation_is_of_a_field_that_is_gone() -> None:
    assert set(EXPECTED) == set(TrainerConfig.model_fields)
    assert set(PASSED_ON) <= set(TrainerConfig.model_fields)


@pytest.mark.parametrize(("config", "check"), CASES)
@pytest.mark.filterwarnings("ignore:You are running in `Trainer\\(barebones=True\\)`")
def test_a_field_reaches_lightning(tmp_path: Path, config: dict[str, Any], check: Check) -> None:
    """On the Trainer that Lightning has built."""
    check(build(settings(**config), tmp_path), tmp_path)


def test_every_argument_of_lightnings_trainer_can_be_given() -> None:
    """Under its own name, or through `lightning_kwargs`; none is lost."""
    import inspect

    theirs = set(inspect.signature(L.Trainer.__init__).parameters) - {"self"}
    ours_by_another_name = {"logger", "default_root_dir"}  # `loggers`, `run.dir`
    assert theirs - ours_by_another_name - set(TrainerConfig.model_fields) == set()


def test_defaults_are_lightnings_own(tmp_path: Path) -> None:
    ours = build(settings(), tmp_path)
    theirs = L.Trainer(accelerator="cpu", devices=1, logger=False)
    for name in (
        "accumulate_grad_batches",
        "check_val_every_n_epoch",
        "gradient_clip_val",
        "limit_train_batches",
        "limit_val_batches",
        "log_every_n_steps",
        "max_epochs",
        "max_steps",
        "num_sanity_val_steps",
        "overfit_batches",
        "precision",
        "reload_dataloaders_every_n_epochs",
        "val_check_interval",
    ):
        assert getattr(ours, name) == getattr(theirs, name), name


def test_a_users_model_checkpoint_and_no_checkpointing_contradict(tmp_path: Path) -> None:
    own = ClassSpec.model_validate({"class": "lightning.pytorch.callbacks:ModelCheckpoint"})
    trainer = build(settings(callbacks=[own]), tmp_path)
    assert sum(isinstance(c, ModelCheckpoint) for c in vars(trainer)["callbacks"]) == 1
    from fairlead.errors import ConfigError

    with pytest.raises(ConfigError, match="ModelCheckpoint"):
        build(settings(callbacks=[own], enable_checkpointing=False), tmp_path)


def test_validation_by_the_clock(tmp_path: Path) -> None:
    """A `val_check_interval` of a time that is always over validates after every batch."""
    config = settings(**{**QUICK, "limit_val_batches": 1}, val_check_interval=timedelta(seconds=0))
    model = Line()
    build(config, tmp_path).fit(model, datamodule=Data())
    assert sum(bool(r.get("val/loss")) for r in metric_rows(tmp_path / "run")) == 3
    assert latest(tmp_path / "run").step == 3


def test_training_stops_when_the_time_is_over(tmp_path: Path) -> None:
    config = settings(**{**QUICK, "max_steps": -1}, max_time=timedelta(seconds=0))
    model = Line()
    build(config, tmp_path).fit(model, datamodule=Data())
    assert len(model.seen) <= 8


def test_clipping_changes_the_training(tmp_path: Path) -> None:
    free, clipped = Line(), Line()
    build(settings(**QUICK), tmp_path / "a").fit(free, datamodule=Data())
    build(settings(**QUICK, gradient_clip_val=1e-8), tmp_path / "b").fit(clipped, datamodule=Data())
    assert apart(free, clipped) > 1e-3


def test_checkpoint_defaults_are_those_of_the_config() -> None:
    assert TrainerConfig().checkpoint == CheckpointConfig()


@pytest.mark.parametrize(
    ("literal", "devices", "name"),
    [("auto", 1, "single_device"), ("ddp_find_unused_parameters_true", 2, "ddp"), ("fsdp_native", 2, "fsdp")],
)
def test_a_strategy_says_its_name(tmp_path: Path, literal: Any, devices: int, name: str) -> None:
    """`trainer.strategy.name`, by which a `configure_model` knows whether it is to shard: the one in a job file."""
    strategy: Any = build(settings(strategy=literal, devices=devices), tmp_path).strategy
    assert strategy.name == name
