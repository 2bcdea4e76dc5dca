"""The global batch, each rank's share of it, and the learning rate that goes with it: arithmetic and messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fairlead import JobConfig, PluginManager, TrainerConfig
from fairlead.cli import commands, main
from fairlead.errors import ConfigError
from fairlead.testing import FakeEntryPoint, minimal_resolution, stand_ins
from fairlead_runs.batch_size import (
    GlobalBatch,
    batch_of_job,
    effective_batch,
    for_each_rank,
    global_batch,
    lr_factor,
    lr_setting,
    scale_lr,
    split_batch,
)
from fairlead_runs.checks import batch

PLUGINS = PluginManager([FakeEntryPoint(name, plugin) for name, plugin in stand_ins().items()])


def test_the_global_batch_is_the_product() -> None:
    """The two examples of the requirements."""
    assert effective_batch(32, devices=8, num_nodes=2, accumulate_grad_batches=4) == 2048
    assert effective_batch(1000, num_nodes=4) == 4000
    batch = GlobalBatch(32, ranks=16, nodes=2, accumulate=4)
    assert (batch.samples, str(batch)) == (2048, "32 per device x 8 devices x 2 nodes x 4 batches")
    assert str(GlobalBatch(32)) == "32 per device"
    assert str(GlobalBatch(32, ranks=7, nodes=2)) == "32 per device x 7 ranks"  # nodes of 4 and 3


@pytest.mark.parametrize(("rule", "factor"), [("linear", 8.0), ("sqrt", 8**0.5), ("none", 1.0)])
def test_the_learning_rate_follows_by_the_rule(rule: Any, factor: float) -> None:
    assert lr_factor(2048, 256, rule) == factor
    assert scale_lr(0.1, 2048, 256, rule) == 0.1 * factor
    assert lr_factor(256, 256, rule) == 1.0


def test_linear_is_the_world_size_where_each_rank_keeps_its_batch() -> None:
    assert scale_lr(0.1, effective=effective_batch(64, devices=4), base=64) == 0.1 * 4


def test_no_rule_and_no_batch_are_errors() -> None:
    with pytest.raises(ConfigError, match="no learning-rate rule 'cubic'"):
        lr_factor(8, 4, "cubic")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a batch of 8 and a base of 0"):
        lr_factor(8, 0)


@pytest.mark.parametrize(
    ("total", "ranks", "accumulate", "said"),
    [
        (1000, 16, 1, ["1000 samples cannot be shared by 16 ranks", "1000 / 16", "992 or 1008"]),
        (100, 8, 4, ["by 8 ranks x 4 batches", "100 / 32", "96 or 128"]),
        (3, 4, 1, ["nearest sizes that can: 4"]),
        (0, 4, 1, ["it has no samples", "can: 4"]),
    ],
)
def test_a_remainder_names_the_nearest_sizes(total: int, ranks: int, accumulate: int, said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        split_batch(total, ranks, accumulate)
    assert all(text in str(caught.value) for text in said)


def test_a_share_times_the_ranks_is_the_whole() -> None:
    assert split_batch(2048, world_size=16, accumulate_grad_batches=4) == 32
    assert split_batch(7, 1) == 7


def job(trainer: dict[str, Any], **sections: Any) -> JobConfig:
    data = {"model": {"class": "m:Net"}, "data": {"class": "m:Data", "args": {"batch_size": 256, "path": "x"}}}
    return JobConfig.model_validate({**data, **sections, "trainer": trainer}, context={"plugins": PLUGINS})


def test_each_rank_builds_its_data_with_its_share() -> None:
    four = minimal_resolution(PLUGINS, devices=4)
    asked = job({"batch_size": "global", "accumulate_grad_batches": 2})
    shared = for_each_rank(asked, four)
    assert shared.data is not None
    assert shared.data.args == {"batch_size": 32, "path": "x"}
    assert asked.data is not None
    assert asked.data.args["batch_size"] == global_batch(asked, asked.trainer) == 256  # what identifies the run
    assert for_each_rank(job({}), four) == job({})
    nested = {"class": "m:Net", "args": {"loader": {"class": "m:L", "args": {"bs": 8}}, "lr": 1}}
    place = {"batch_size": "global", "batch_size_from": "model.args.loader.args.bs"}
    shared = for_each_rank(job(place, model=nested), four)
    assert shared.model.args == {"loader": {"class": "m:L", "args": {"bs": 2}}, "lr": 1}


def test_what_cannot_be_shared_is_refused_before_anything_is_built() -> None:
    three = minimal_resolution(PLUGINS, devices=3)
    with pytest.raises(ConfigError, match="256 samples cannot be shared by 3 ranks") as caught:
        for_each_rank(job({"batch_size": "global"}), three)
    assert caught.value.where == "data.args.batch_size"
    evaluated = for_each_rank(job({"batch_size": "global"}), three, evaluates=True).data
    assert evaluated is not None
    assert evaluated.args["batch_size"] == 85
    for place, said in (
        ("data.args.bs", "no job says a batch size"),
        ("data.args.path", "the batch size is 'x'"),
        ("trainer.devices", "no argument of the job's data or model"),
        ("batch_size", "no argument of the job's data or model"),
    ):
        with pytest.raises(ConfigError, match=said):
            for_each_rank(job({"batch_size": "global", "batch_size_from": place}), three)
    assert (
        batch_of_job(job({}, data={"class": "m:Data", "args": {"batch_size": "auto"}})) is None
    )  # no fault of the job
    with pytest.raises(ConfigError, match="no job says a batch size"):
        global_batch(None, TrainerConfig(batch_size="global"))


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValidationError, match="lr_rule: sqrt needs base_batch_size"):
        TrainerConfig(lr_rule="sqrt")
    with pytest.raises(ValidationError, match="keep_per_device another"):
        TrainerConfig(batch_size="global", batch_policy="keep_per_device")
    assert TrainerConfig(lr_rule="none").base_batch_size is None


def test_without_a_base_no_learning_rate_is_touched() -> None:
    assert lr_setting(TrainerConfig(), GlobalBatch(32, 4)) is None
    linear = lr_setting(TrainerConfig(base_batch_size=64), GlobalBatch(32, 4))
    assert linear is not None
    assert (linear.value, linear.reason) == (2.0, "lr_rule linear: global batch 128 / base_batch_size 64")


@pytest.mark.parametrize(
    ("trainer", "args", "expected"),
    [
        ({}, {"batch_size": 32}, {"batch_per_device": 32, "global_batch": 64}),
        ({"accumulate_grad_batches": 4}, {}, {"batch_per_device": 8, "global_batch": 64}),  # the class's default
        (
            {"batch_size": "global", "base_batch_size": 16, "lr_rule": "sqrt"},
            {"batch_size": 64},
            {"batch_per_device": 32, "global_batch": 64, "lr_factor": 2.0},
        ),
        ({"base_batch_size": 16, "batch_size_from": "data.args.n"}, {}, {"lr_factor": None}),  # the loaders will say it
        ({}, {"batch_size": "auto"}, {}),
    ],
)
def test_explain_shows_the_numbers(
    tmp_path: Path,
    fairlead_plugins: Callable[..., PluginManager],
    capsys: pytest.CaptureFixture[str],
    trainer: dict[str, Any],
    args: dict[str, Any],
    expected: dict[str, Any],
) -> None:
    said = explained(tmp_path, fairlead_plugins, capsys, trainer, args)
    numbers = {name: one["value"] for name, one in said["settings"].items()}
    assert {name: numbers.get(name) for name in expected} == expected
    assert numbers.keys() & {"batch_per_device", "global_batch", "lr_factor"} == expected.keys()


def test_check_names_the_sizes_that_can_be_shared(
    tmp_path: Path, fairlead_plugins: Callable[..., PluginManager], capsys: pytest.CaptureFixture[str]
) -> None:
    said = explained(tmp_path, fairlead_plugins, capsys, {"batch_size": "global"}, {"batch_size": 33})
    (found,) = (one for one in said["findings"] if one["severity"] == "error")
    assert (found["code"], found["fix"]) == ("batch-size", "the nearest sizes that can: 32 or 34")
    assert found["where"] == "job.json:1, data.args.batch_size"


def explained(
    folder: Path,
    plugins: Callable[..., PluginManager],
    capsys: pytest.CaptureFixture[str],
    trainer: dict[str, Any],
    args: dict[str, Any],
) -> Any:
    (folder / "net.py").write_text("class Net: pass\nclass Data:\n    def __init__(self, batch_size=8, n=None): ...\n")
    asked = {"model": "net:Net", "data": {"class": "net:Data", "args": args}, "trainer": {"devices": 2, **trainer}}
    (folder / "job.json").write_text(json.dumps(asked))
    manager = plugins({"command.explain": commands.explain, "check.batch": batch}, stand_ins())
    main(["explain", "job.json", "--json"], plugins=manager, environ={}, cwd=folder)
    return json.loads(capsys.readouterr().out)
