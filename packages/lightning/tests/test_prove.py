"""What a proof of a resume reads of a user's code, and how it names what differs."""

from __future__ import annotations

import random
import sys
from collections import defaultdict, deque
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from tiny_job import Line, plain

from fairlead_distributed.run.memory import remembered
from fairlead_launch.prove.course import Unequal, explained, trained_otherwise
from fairlead_launch.prove.plan import Plan
from fairlead_lightning.resume.users import owners_of_fit


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
        plan = Plan.of(steps)
        assert 0 < plan.checkpoint < plan.kill < plan.steps


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
        "  why:   the start reported: the loader of training has no state",
        f"  why:   not restored: {lost}",
    ]
    assert not any("not found" in line for line in explained([differs], [], said, {}))
    assert any("not found" in line for line in explained([differs], [], [], {}))
