"""What a proof of a resume reads of a user's code, and how it names what differs."""

from __future__ import annotations

import random
import sys
from collections import defaultdict, deque
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from tiny_job import Line, plain

from fairlead_distributed.run.memory import remembered
from fairlead_launch.prove.compare import Unequal, trained_otherwise
from fairlead_launch.prove.course import explained
from fairlead_lightning.commands.prove import covered
from fairlead_lightning.commands.prove_plan import DecidingPlan, Epochs
from fairlead_lightning.commands.prove_probe import owners_of_fit


class Helper:
    def __init__(self) -> None:
        self.mean = 0.5
        self.recent = deque([1, 2], maxlen=4)


class Keeps(L.Callback):
    """All kinds of things that a callback may keep."""

    def __init__(self) -> None:
        self.stats: dict[str, list[float]] = defaultdict(list)
        self.helper = Helper()
        self.average = torch.nn.Linear(2, 1)
        self.rng = np.random.default_rng(0)
        self.python = random.Random(0)
        self.names = {"b", "a"}
        self.itself = self
        self.function = print


def memory(model: L.LightningModule, callback: L.Callback) -> dict[str, str]:
    trainer = plain(max_steps=1, callbacks=[callback])
    trainer.strategy._lightning_module = model
    return remembered(owners_of_fit(trainer), ())


def test_what_a_callback_keeps_is_read() -> None:
    callback = Keeps()
    callback.stats["x"].append(1.5)
    found = memory(Line(), callback)
    assert found["stats['x'][0] of the callback Keeps"] == "1.5"
    assert found["helper.mean of the callback Keeps"] == "0.5"
    assert found["helper.recent of the callback Keeps"] == "2 items"
    assert {"rng of the callback Keeps", "python of the callback Keeps"} <= found.keys()
    assert not [name for name in found if name.startswith(("function", "itself."))]


def test_each_change_shows() -> None:
    """And nothing else: reading draws no random numbers, and the order of a set does not count."""
    callback, model = Keeps(), Line()
    state = torch.get_rng_state()
    before = memory(model, callback)
    assert torch.equal(torch.get_rng_state(), state)
    callback.names = {"a", "b"}
    assert memory(model, callback) == before
    betas = (0.9, 0.99)
    stats: dict[str, Any] = {
        "first": betas,
        "second": betas,
    }  # Lightning's finetuning keeps one tuple, and restores two
    callback.stats = stats
    shared = memory(model, callback)
    stats["second"] = (*list(betas),)
    assert memory(model, callback) == shared
    callback.stats = {}
    with torch.no_grad():
        callback.average.weight.add_(1)
    callback.rng.random()
    callback.helper.recent.append(3)
    model.seen.append(7)
    after = memory(model, callback)
    changed = {name.partition(" ")[0] for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert changed == {"average.weight", "rng", "helper.recent", "helper.recent[2]", "seen", "seen[0]"}


def test_what_is_in_the_checkpoint_is_not_read_again() -> None:
    """Parameters, buffers, hyperparameters, and what Lightning keeps in a module."""
    model = Line()
    assert {name for name in memory(model, Keeps()) if "model" in name} == {"seen of the model Line"}


def test_variables_of_the_users_modules_are_read(tmp_path: Path) -> None:
    module: Any = ModuleType("users_own")
    module.__file__ = str(tmp_path / "users_own.py")
    module.SCALE = {"value": 2.0}
    module.Counts = type("Counts", (), {"number": 3, "__module__": "users_own"})
    sys.modules["users_own"] = module
    try:
        trainer = plain(max_steps=1)
        trainer.strategy._lightning_module = Line()
        found = remembered(owners_of_fit(trainer), (tmp_path,))
    finally:
        del sys.modules["users_own"]
    assert found["SCALE['value'] of the module users_own"] == "2.0"
    assert found["Counts.number of the module users_own"] == "3"


def test_the_places_of_a_proof() -> None:
    """There is a step between the checkpoint and the kill, and the kill comes before the last step."""
    for steps in range(3, 40):
        plan = DecidingPlan.of(steps)
        assert 0 < plan.checkpoint < plan.kill < plan.steps


EPOCH_OF_100 = Epochs(100, 1, validates=True, every_batches=100, every_epochs=1, by_epoch=False)


@pytest.mark.parametrize(
    "epochs",
    [
        EPOCH_OF_100,
        replace(EPOCH_OF_100, accumulate=4),
        replace(EPOCH_OF_100, every_batches=25),
        replace(EPOCH_OF_100, every_batches=500, every_epochs=None),
        replace(EPOCH_OF_100, every_batches=4, every_epochs=3),
        replace(EPOCH_OF_100, batches=None, every_batches=None),
        replace(EPOCH_OF_100, every_batches=0),
        replace(EPOCH_OF_100, validates=False, by_epoch=True),
        replace(EPOCH_OF_100, every_batches=3, by_epoch=True),  # validations come, but no end of an epoch
    ],
)
def test_epochs_are_cut_where_steps_do_not_reach_a_decision(epochs: Epochs) -> None:
    """One before the checkpoint, so that the state of what decides is in it; one behind the kill, which needs that."""
    for steps in (3, 8, 20, 33):
        assert not DecidingPlan.of(steps).reaches_decisions(epochs)
        plan = DecidingPlan.of(steps).deciding(epochs)
        assert plan.steps >= steps
        assert plan.epoch is not None
        every = None if epochs.every_epochs is None else 1
        shorter = replace(epochs, batches=plan.epoch, every_batches=plan.epoch, every_epochs=every)
        assert plan.reaches_decisions(shorter)


def test_epochs_stay_whole_where_the_steps_reach() -> None:
    assert DecidingPlan.of(20).reaches_decisions(replace(EPOCH_OF_100, batches=8, every_batches=8))
    assert DecidingPlan.of(20).reaches_decisions(replace(EPOCH_OF_100, batches=16, every_batches=16, accumulate=2))
    # A validation between checkpoint and kill saves: the resume would begin there.
    assert not DecidingPlan.of(20).reaches_decisions(replace(EPOCH_OF_100, batches=4, every_batches=4))


def test_the_last_line_says_which_decisions_it_has_seen() -> None:
    """And which not: a schedule that has not come to its turn is not proven."""
    decided = {
        "begin": {"EarlyStopping": "inf", "ReduceLROnPlateau": "0", "Mine": "0"},
        "checkpoint": {"EarlyStopping": "0.5", "ReduceLROnPlateau": "0", "Mine": "0"},
        "end": {"EarlyStopping": "0.4", "ReduceLROnPlateau": "0", "Mine": "1"},
    }
    noted = {"step": 8, "validates": True, "validated": [3, 6], "decided": decided}
    plan = DecidingPlan.of(8).deciding(EPOCH_OF_100)
    line = covered(noted, plan, EPOCH_OF_100)
    assert line.startswith("compared after 8 steps, in epochs of 3 batches of 100, each with a validation: weights")
    assert "with the validations after step 3, 6; ReduceLROnPlateau decided nothing in these steps" in line
    assert "Mine decided nothing before the checkpoint" in line
    assert line.endswith("; EarlyStopping decided before the checkpoint and after the resume")
    none = covered(noted | {"validated": [], "decided": {}}, DecidingPlan.of(8), None)
    assert none.startswith("compared after 8 steps: ")
    assert none.endswith("; no validation came in these steps")


def test_an_item_is_told_with_what_holds_it() -> None:
    whole = Unequal("memory", "stats['x'] of the model Net", "4 items became 0 items")
    item = Unequal("memory", "stats['x'][0] of the model Net", "1.5 became nothing")
    assert item.is_part_of(whole)
    assert not whole.is_part_of(item)
    assert not item.is_part_of(Unequal("memory", "stats['x'] of the callback Net", "other"))
    assert whole.owner == "model"


def test_metrics_alone_are_no_other_training() -> None:
    """The samples a second are never alike, nor generators that nobody seeds; weights are."""
    assert not trained_otherwise([Unequal("metric", "speed", "1 became 2")])
    assert not trained_otherwise([Unequal("tensor", "rank-00000.rng.numpy", "3 of 624 elements differ")])
    assert trained_otherwise([Unequal("tensor", "state_dict.weight", "3 of 3 elements differ")])


def test_what_the_start_said_is_a_reason() -> None:
    """Before what was not restored; with neither, the reason is not known."""
    differs = Unequal("metric", "loss", "1 became 2 at step 4")
    lost = Unequal("memory", "shadow of the callback Ema", "6 items became 0 items")
    said = ["the loader of training has no state"]
    lines = explained([differs], [lost], said, {})
    assert [line for line in lines if line.startswith("  why:")] == [
        "  why:   the start said: the loader of training has no state",
        f"  why:   not restored: {lost}",
    ]
    assert not any("not found" in line for line in explained([differs], [], said, {}))
    assert any("not found" in line for line in explained([differs], [], [], {}))
