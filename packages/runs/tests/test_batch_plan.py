"""What stays the same when a run goes on with another number of ranks."""

from __future__ import annotations

from typing import Any

import pytest

from fairlead import TrainerConfig
from fairlead.errors import ConfigError
from fairlead.plugins import PluginManager
from fairlead.resolve import Resolution, resolve
from fairlead.testing import FakeEntryPoint, stand_ins
from fairlead_runs.batch_size import batch_plan

PLUGINS = PluginManager([FakeEntryPoint(name, plugin) for name, plugin in stand_ins().items()])


def resolution(world: int, **config: Any) -> Resolution:
    fields = {"accelerator": "cpu", "devices": world, **config}
    trainer = TrainerConfig.model_validate(fields, context={"plugins": PLUGINS})
    return resolve(trainer, environ={}, plugins=PLUGINS)


def before(world: int, accumulate: int = 1) -> dict[str, int]:
    return {"world_size": world, "accumulate_grad_batches": accumulate}


@pytest.mark.parametrize(
    ("old", "new_world", "accumulate"),
    [
        (before(4, 1), 2, 2),
        (before(4, 1), 1, 4),
        (before(4, 2), 1, 8),
        (before(2, 4), 8, 1),
        (before(1, 6), 3, 2),
        # The start before had already halved the ranks and doubled the accumulation.
        (before(2, 2), 2, 2),
        (before(2, 2), 4, 1),
    ],
)
def test_keep_global_keeps_the_samples_of_a_step(old: dict[str, int], new_world: int, accumulate: int) -> None:
    assert batch_plan(resolution(new_world, batch_policy="keep_global"), old) == accumulate
    assert new_world * accumulate == old["world_size"] * old["accumulate_grad_batches"]


@pytest.mark.parametrize("new_world", [1, 2, 8])
def test_keep_per_device_keeps_what_was_asked_for(new_world: int) -> None:
    config = resolution(new_world, batch_policy="keep_per_device", accumulate_grad_batches=3)
    assert batch_plan(config, before(4, 3)) == 3


def test_without_a_policy_another_world_size_is_an_error_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="4 ranks and would resume with 2") as caught:
        batch_plan(resolution(2, accumulate_grad_batches=3), before(4, 3))
    assert "from 12 to 6" in str(caught.value)
    assert "keep_global" in str(caught.value)


def test_a_global_batch_that_cannot_be_shared_names_the_ranks_that_can() -> None:
    with pytest.raises(ConfigError, match="3 ranks cannot share a global batch of 4 x the batch of one rank") as caught:
        batch_plan(resolution(3, batch_policy="keep_global"), before(4))
    assert "start 2 or 4 ranks" in str(caught.value)


def test_nothing_changes_where_nothing_changed() -> None:
    for policy in (None, "keep_global", "keep_per_device"):
        config = resolution(2, accumulate_grad_batches=2, batch_policy=policy)
        assert batch_plan(config, before(2, 2)) == 2
        assert batch_plan(config, None) == 2
        assert batch_plan(config, {"step": 3}) == 2  # a plain checkpoint says nothing
