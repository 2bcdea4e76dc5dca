"""The models that a user writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Annotated, Any, Literal

import pytest
from pydantic import ValidationError

from fairlead import (
    ClassSpec,
    EnvironmentConfigBase,
    EnvironmentPlugin,
    JobConfig,
    LayerSyncConfigBase,
    LayerSyncPlugin,
    LoggerConfigBase,
    LoggerPlugin,
    PluginManager,
    SubmitterConfigBase,
    SubmitterPlugin,
    TrainerConfig,
    yaml,
)
from fairlead.config.marks import MayChange, NotExact, PassedToLightning, inexact_settings, marked
from fairlead.durations import format_duration, parse_duration
from fairlead.testing import stand_ins

JOB = {"model": {"class": "m:Net"}}


class ClusterEnvironmentConfig(EnvironmentConfigBase):
    """A cluster."""

    name: Literal["cluster"] = "cluster"


class Cluster(EnvironmentPlugin):
    """A cluster."""

    config = ClusterEnvironmentConfig


class FileLoggerConfig(LoggerConfigBase):
    """A file."""

    name: Literal["file"] = "file"
    path: str = "x"


class FileLogger(LoggerPlugin):
    """A file."""

    config = FileLoggerConfig


class SyncLayerSyncConfig(LayerSyncConfigBase):
    """Synchronised layers."""

    name: Literal["sync"] = "sync"


class Sync(LayerSyncPlugin):
    """Synchronised layers."""

    config = SyncLayerSyncConfig


class QueueSubmitterConfig(SubmitterConfigBase):
    """A queue."""

    name: Literal["queue"] = "queue"


class Queue(SubmitterPlugin):
    """A queue."""

    config = QueueSubmitterConfig


@pytest.fixture(autouse=True)
def plugins(fairlead_plugins: Callable[..., PluginManager]) -> PluginManager:
    """What a CPU job needs, a cluster, a logger, a layer sync and a queue."""
    return fairlead_plugins(stand_ins(), Cluster(), FileLogger(), Sync(), Queue())


def refused(**trainer: Any) -> str:
    """The message that a trainer's setting is refused with."""
    with pytest.raises(ValidationError) as caught:
        TrainerConfig(**trainer)
    return "; ".join(e.get("ctx", {}).get("what") or e["msg"] for e in caught.value.errors())


def test_strategy_devices_and_nodes_together() -> None:
    config = TrainerConfig(strategy="ddp", devices=4, num_nodes=1)
    assert (config.strategy.name, config.devices, config.num_nodes) == ("ddp", 4, 1)  # type: ignore[union-attr]  # a config


def test_an_unknown_strategy_lists_the_valid_names() -> None:
    with pytest.raises(ValidationError) as caught:
        TrainerConfig(strategy="dpp")
    (error,) = caught.value.errors()
    assert error["type"] == "unknown-tag"
    assert error["ctx"]["why"] == "installed: ddp, single_device; also: auto"
    assert error["ctx"]["fix"] == "did you mean 'ddp'?"


@pytest.mark.parametrize("devices", ["auto", 1, 8, -1, [0], [0, 2]])
def test_devices(devices: Any) -> None:
    """One of `auto`, a number, a list of indices, -1."""
    assert TrainerConfig(devices=devices).devices == devices


@pytest.mark.parametrize(("text", "devices"), [("2", 2), ("-1", -1), ("0, 2", [0, 2]), ("3,", [3])])
def test_devices_as_text_are_what_lightning_takes_them_for(text: str, devices: Any) -> None:
    assert TrainerConfig(devices=text).devices == devices  # type: ignore[arg-type]
    assert TrainerConfig(log_every_n_steps=0).log_every_n_steps == 0


@pytest.mark.parametrize("devices", [0, -2, "0", "²", "1.0", "all", [], [0, 0], [-1], True, 1.0, None])
def test_what_devices_are_not(devices: Any) -> None:
    assert refused(devices=devices)


@pytest.mark.parametrize("name", ["gpu", "cuda", "mps", "tpu", "xla"])
def test_an_accelerator_that_is_not_installed_gives_the_pip_line(name: str) -> None:
    """Every name is known, also where its package is not."""
    with pytest.raises(ValidationError) as caught:
        TrainerConfig(accelerator=name)
    (error,) = caught.value.errors()
    assert error["type"] == "plugin-missing"
    assert error["ctx"]["fix"].startswith("pip install ")


def test_plugins_are_spread_onto_their_axes() -> None:
    """A list that mixes axes, as config objects, mappings named `axis.name`, or such names."""
    config = TrainerConfig(
        plugins=[
            ClusterEnvironmentConfig(auto_requeue=False),
            {"name": "logger.file", "path": "y"},
            "checkpoint_io.torch",
            FileLoggerConfig(),
        ]
    )
    assert config.environment == ClusterEnvironmentConfig(auto_requeue=False)
    assert [logger.model_dump()["path"] for logger in config.loggers] == ["y", "x"]
    assert config.checkpoint_io.name == "torch"  # type: ignore[union-attr]  # a config
    assert config.plugins == []
    assert TrainerConfig.model_validate(config.model_dump()) == config


def test_two_plugins_of_one_axis_are_refused() -> None:
    said = refused(plugins=[ClusterEnvironmentConfig(), "environment.lightning"])
    assert said == "the environment is set twice: in `plugins[0]` and in `plugins[1]`"
    said = refused(environment="lightning", plugins=[ClusterEnvironmentConfig()])
    assert said == "the environment is set twice: in `environment` and in `plugins[0]`"
    assert TrainerConfig(environment="auto", plugins=[ClusterEnvironmentConfig()]).environment.name == "cluster"  # type: ignore[union-attr]  # a config


@pytest.mark.parametrize("item", [5, None, "ddp", {"name": "ddp"}, {}, "max_steps.5", {"name": "devices.2"}])
def test_what_is_no_plugin_of_an_axis(item: Any) -> None:
    assert refused(plugins=[item]).startswith("plugins[0] is ")


def test_a_misspelt_axis_has_a_suggestion() -> None:
    with pytest.raises(ValidationError) as caught:
        TrainerConfig(plugins=["enviroment.cluster"])
    assert caught.value.errors()[0]["ctx"]["fix"] == "did you mean environment.cluster?"


@pytest.mark.parametrize("loggers", [None, "file", 3])
def test_plugins_beside_loggers_that_are_no_list(loggers: Any) -> None:
    assert refused(loggers=loggers, plugins=["logger.file"])


def test_layer_sync_twice() -> None:
    assert "set twice" in refused(sync_batchnorm=True, layer_sync="sync")
    assert TrainerConfig(sync_batchnorm=True).layer_sync is None


def test_lightning_kwargs_only_for_what_has_no_field() -> None:
    assert TrainerConfig(lightning_kwargs={"some_new_argument": 1}).lightning_kwargs == {"some_new_argument": 1}
    assert "`trainer.max_steps`" in refused(lightning_kwargs={"max_steps": 1})
    assert "`loggers`" in refused(lightning_kwargs={"logger": False})
    assert "`run.dir`" in refused(lightning_kwargs={"default_root_dir": "x"})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("24:00:00", 86400),
        ("10:30", 630),
        ("00:00:00:05", 5),
        ("02:00:00:00", 172800),
        ("1-12:00:00", 129600),
        ("1-00:30", 86430),
        (90, 90),
        (0.5, 0.5),
        ({"hours": 4, "minutes": 1}, 14460),
        (timedelta(seconds=7), 7),
    ],
)
def test_durations(text: Any, seconds: float) -> None:
    assert parse_duration(text) == timedelta(seconds=seconds)
    assert parse_duration(format_duration(timedelta(seconds=int(seconds)))) == timedelta(seconds=int(seconds))


@pytest.mark.parametrize(
    "value",
    ["", ":", "1", "a:b", "1:2:3:4:5", "-1:00", "1--1:00", "²:00", -5, True, None, [], {"hour": 1}, {"hours": "x"},
     1e300,
     float("inf"), float("nan"), "9999999999999:00:00", {"days": -1}, {3: 4}],
)  # fmt: skip
def test_what_is_no_duration(value: Any) -> None:
    with pytest.raises(ValueError, match=r"time|hours|run|NaN"):
        parse_duration(value)
    if value is not None:
        refused(max_time=value)


def test_a_duration_is_written_as_lightning_reads_it() -> None:
    assert json.loads(TrainerConfig(max_time="1-01:02:03").model_dump_json())["max_time"] == "01:01:02:03"  # type: ignore[arg-type]  # text


@pytest.mark.parametrize(("value", "kept"), [(10, 10), (0.25, 0.25), (1.0, 1.0), ("00:10:00", timedelta(minutes=10))])
def test_val_check_interval(value: Any, kept: Any) -> None:
    assert TrainerConfig(val_check_interval=value).val_check_interval == kept


@pytest.mark.parametrize("value", [0, -1, 1.5, 2.0, "10"])
def test_a_number_is_no_validation_time(value: Any) -> None:
    """1.5 is neither a number of batches nor a fraction, and silently 1.5 seconds would be worse."""
    refused(val_check_interval=value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("limit_train_batches", 1), ("limit_train_batches", 1.0), ("fast_dev_run", True), ("fast_dev_run", 3)],
)
def test_a_count_stays_a_count_and_a_fraction_a_fraction(field: str, value: Any) -> None:
    kept = getattr(TrainerConfig(**{field: value}), field)
    assert (kept, type(kept)) == (value, type(value))


def test_steps_that_exclude_each_other() -> None:
    assert "above max_steps" in refused(max_steps=10, min_steps=20)
    assert TrainerConfig(max_steps=-1, min_steps=20).min_steps == 20


def test_strict_types_and_no_unknown_fields() -> None:
    assert "valid integer" in refused(max_steps="100")
    assert "Extra inputs" in refused(max_step=100)


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        TrainerConfig().max_steps = 3  # type: ignore[misc]  # what is tested


def test_a_class_may_be_just_its_name() -> None:
    job = JobConfig.model_validate(
        {"model": "m:Net", "trainer": {"callbacks": ["m:Ema"], "profiler": {"class": "m:P"}}}
    )
    assert job.model == ClassSpec.model_validate({"class": "m:Net", "args": {}})
    assert job.trainer.callbacks[0].class_ == "m:Ema"
    assert isinstance(job.trainer.profiler, ClassSpec)


def test_a_job_survives_yaml() -> None:
    """What is written as job.yaml is the same job."""
    job = JobConfig.model_validate(
        {
            "run": {"name": "a-{model.args.lr}", "seed": None},
            "model": {"class": "m:Net", "args": {"lr": 1e-5, "inner": {"class": "m:X", "args": {}}}},
            "data": {"class": "m:Data"},
            "trainer": {"strategy": "ddp", "loggers": ["file"], "max_time": "24:00:00", "devices": [0, 1]},
            "resources": {"nodes": 4, "device": "h100"},
            "submit": {"to": "queue", "time": "24:00:00", "extra": {"qos": "high", "exclusive": True}},
        }
    )
    text = yaml.dump(job.model_dump(mode="json"))
    assert "class: m:Net" in text
    assert "class_" not in text
    assert "submit:\n  to: queue\n" in text
    assert JobConfig.model_validate(yaml.load(text, source="job.yaml").data) == job


def test_where_a_job_is_submitted_to_is_called_so() -> None:
    """`to` stands where other plugins have `name`; in Python it is the class."""
    job = JobConfig.model_validate({**JOB, "submit": {"to": "queue", "time": "24:00:00"}})
    assert job.submit == QueueSubmitterConfig(time=timedelta(days=1))
    assert JobConfig.model_validate({**JOB, "submit": "queue"}).submit == QueueSubmitterConfig()
    for wrong, said in (
        ({"time": 60}, "a mapping without `to`"),
        ({"name": "queue"}, "a mapping with `name`"),
        ({"to": "queue", "name": "queue"}, "a mapping with `name`"),
        ({"to": "queu"}, "unknown submitter 'queu'"),
    ):
        with pytest.raises(ValidationError, match=said):
            JobConfig.model_validate({**JOB, "submit": wrong})
    with pytest.raises(ValidationError, match=r"is .submitter\.queue."):
        TrainerConfig.model_validate({"plugins": ["submitter.queue"]})
    submit = JobConfig.model_json_schema()["properties"]["submit"]
    (schema,) = (option for option in submit["anyOf"] if "properties" in option)
    assert schema["properties"]["to"]["enum"] == ["queue"]
    assert "name" not in schema["properties"]


def test_every_field_is_documented() -> None:
    """Rule 8."""

    def bare(model: Any) -> list[str]:
        return [f"{model.__name__}.{name}" for name, field in model.model_fields.items() if not field.description]

    from fairlead import config

    models = [getattr(config, name) for name in config.__all__ if name.endswith(("Config", "Spec"))]
    assert len(models) == 6
    assert [name for model in models for name in bare(model)] == []


def test_a_field_says_about_itself_what_matters_elsewhere() -> None:
    class Ours(TrainerConfig):
        temperature: Annotated[float, MayChange("it only smooths the plots"), NotExact(bool, why="w", fix="f")] = 0.0

    assert marked(Ours, MayChange)["temperature"].why == "it only smooths the plots"
    assert [(reason.what, reason.certain) for reason in inexact_settings(Ours(temperature=0.5), "trainer")] == [
        ("trainer.temperature: 0.5", True)
    ]
    assert "temperature" not in marked(Ours, PassedToLightning)
    weights = TrainerConfig.model_validate({"checkpoint": {"save_weights_only": True}})
    assert [reason.what for reason in inexact_settings(weights, "trainer")] == [
        "trainer.checkpoint.save_weights_only: true"
    ]


def test_integers_stay_the_keys_of_an_argument() -> None:
    """A schedule by epochs, `{0: 8, 4: 4}`; JSON has text only, and Lightning refuses that."""
    schedule = {"class": "GradientAccumulationScheduler", "args": {"scheduling": {0: 8, 4: [{1: "x"}]}}}
    dumped = TrainerConfig(callbacks=[schedule]).model_dump(mode="json")  # type: ignore[list-item]
    assert dumped["callbacks"] == [schedule]
    assert TrainerConfig.model_validate(dumped).model_dump(mode="json") == dumped
