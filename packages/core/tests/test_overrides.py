"""`--set PATH=VALUE` as CLI.md has it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from fairlead.errors import ConfigError
from fairlead.overrides import apply_override, parse_override

JOB: dict[str, Any] = {
    "model": {"class": "m:Net", "args": {"lr": 0.1, "layers": [1, 2]}},
    "data": "m:Data",
    "trainer": {"strategy": "ddp", "environment": {"name": "slurm", "auto_requeue": True}, "loggers": ["csv"]},
}


def put(text: str, data: Any = JOB) -> Any:
    """The job after one `--set`; the job before is left as it was."""
    before = copy.deepcopy(data)
    after = apply_override(data, *parse_override(text))
    assert data == before
    return after


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001), ("10", 10), ("010", 10), ("true", True), ("off", "off"), ("null", None), ("~", None),
        ("", None),
        ("24:00:00", "24:00:00"), ("'10'", "10"), ("[0, 2]", [0, 2]), ("{name: ddp}", {"name": "ddp"}), ("a=b", "a=b"),
        ("slurm", "slurm"),
    ],
)  # fmt: skip
def test_values_are_yaml_1_2(text: str, value: Any) -> None:
    assert parse_override(f"trainer.x={text}") == (("trainer", "x"), value)


@pytest.mark.parametrize("text", ["trainer.max_steps", "=3", "a..b=1", ".a=1", "a.=1", "a[x]=1", "a[=1", "a[-1]=1", ""])
def test_a_malformed_path(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_override(text)
    assert caught.value.fix is not None


def test_a_value_that_is_not_yaml() -> None:
    with pytest.raises(ConfigError, match=r"--set trainer\.devices"):
        parse_override("trainer.devices=[0, 1")


def test_setting_replaces_and_never_merges() -> None:
    assert put("model.args.layers=[3]")["model"]["args"]["layers"] == [3]
    assert put("model.args={lr: 1}")["model"]["args"] == {"lr": 1}
    assert put("trainer.environment={name: lsf}")["trainer"]["environment"] == {"name": "lsf"}


def test_setting_the_name_of_a_plugin_replaces_the_node() -> None:
    assert put("trainer.environment.name=lsf")["trainer"]["environment"] == {"name": "lsf"}
    assert put("trainer.loggers[0].name=wandb")["trainer"]["loggers"] == [{"name": "wandb"}]
    assert put("run.name=x")["run"] == {"name": "x"}


def test_setting_a_field_promotes_a_literal() -> None:
    assert put("trainer.strategy.bucket_cap_mb=50")["trainer"]["strategy"] == {"name": "ddp", "bucket_cap_mb": 50}
    assert put("trainer.loggers[0].dir=x")["trainer"]["loggers"] == [{"name": "csv", "dir": "x"}]
    assert put("data.args.batch_size=4")["data"] == {"class": "m:Data", "args": {"batch_size": 4}}
    assert put("trainer.precision.scale=2", {"trainer": {"precision": 32}})["trainer"]["precision"] == {
        "name": 32,
        "scale": 2,
    }


def test_what_is_missing_is_made() -> None:
    assert put("trainer.checkpoint.every_n_steps=5", {})["trainer"] == {"checkpoint": {"every_n_steps": 5}}
    assert put("trainer.devices=2", {"trainer": None})["trainer"] == {"devices": 2}
    assert put("trainer.callbacks[0].args.decay=1", {})["trainer"] == {"callbacks": [{"args": {"decay": 1}}]}


def test_lists_by_index() -> None:
    assert put("model.args.layers[1]=9")["model"]["args"]["layers"] == [1, 9]
    assert put("model.args.layers[2]=9")["model"]["args"]["layers"] == [1, 2, 9]
    assert put("trainer.loggers.0=wandb")["trainer"]["loggers"] == ["wandb"]


@pytest.mark.parametrize(
    "text",
    [
        "model.args.layers[5]=1",
        "model.args.layers.x=1",
        "model.args.lr.x=1",
        "model.class.x=1",
        "model.args.layers[9].x=1",
    ],
)
def test_a_path_through_something_without_parts(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        put(text)
    assert caught.value.where == f"--set {text.partition('=')[0].replace('.x', '.x')}"


def test_two_overrides_apply_in_order() -> None:
    assert put("trainer.strategy.stage=2", put("trainer.strategy=deepspeed"))["trainer"]["strategy"] == {
        "name": "deepspeed",
        "stage": 2,
    }


def test_integer_keys_are_set_as_such() -> None:
    path, value = parse_override("trainer.callbacks[0].args.scheduling.4=2")
    job = {"trainer": {"callbacks": [{"class": "x", "args": {"scheduling": {0: 8, 4: 4}}}]}}
    args = apply_override(job, path, value)["trainer"]["callbacks"][0]["args"]
    assert args == {"scheduling": {0: 8, 4: 2}}
    assert apply_override({"a": {"b": 1}}, ("a", 4), 2) == {"a": {"b": 1, "4": 2}}


def test_a_digit_that_is_no_number_is_a_name() -> None:
    assert parse_override("trainer.²=1") == (("trainer", "²"), 1)


def test_a_scheduler_that_is_only_named_becomes_a_mapping() -> None:
    assert put("submit.time=24:00:00", {"submit": "slurm"})["submit"] == {"to": "slurm", "time": "24:00:00"}
    assert put("submit.to=lsf", {"submit": {"to": "slurm", "time": 60}})["submit"] == {"to": "lsf", "time": 60}
