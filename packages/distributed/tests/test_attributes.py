"""What objects keep in attributes, saved and put back: of every kind of plain data, in the same objects."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import random
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fairlead_distributed import attributes
from fairlead_distributed.attributes import Attributes


class Mean:
    """A helper object of a user's."""

    def __init__(self) -> None:
        self.value = 0.0
        self.history: list[float] = []


class Transition(NamedTuple):
    state: Tensor
    reward: float


@dataclasses.dataclass
class Episode:
    length: int = 0
    rewards: list[float] = dataclasses.field(default_factory=list)


class Keeper:
    """Everything that people keep in attributes."""

    def __init__(self) -> None:
        self.steps = 0
        self.stats: dict[str, list[float]] = {"loss": []}
        self.alias = self.stats["loss"]
        self.mean = Mean()
        self.hidden: Tensor | None = None
        self.weights = torch.zeros(3)
        self.array = np.zeros(3, dtype=np.uint32)
        self.replay: deque[Tensor] = deque(maxlen=2)
        self.seen: set[int] = set()
        self.episode = Episode()
        self.current = self.episode
        self.episodes = [Episode()]
        self.buffer: deque[Transition] = deque(maxlen=2)
        self.folder = Path("somewhere")
        self.rng, self.numpy, self.torch = random.Random(1), np.random.default_rng(1), torch.Generator().manual_seed(1)
        self.legacy = np.random.RandomState(1)
        self.never = ["touched"] * 3

    def step(self) -> list[float]:
        """Changes all of it, and says what was drawn."""
        self.steps += 1
        self.stats["loss"].append(0.5 * self.steps)
        self.mean.value += 1
        self.mean.history.append(self.mean.value)
        self.hidden = torch.full((2,), float(self.steps))
        self.weights += 1
        self.array += 1
        self.replay.append(torch.tensor(self.steps))
        self.seen.add(self.steps)
        self.episode.length += 1  # changed where it is
        self.episodes[-1].length += 1
        self.episodes.append(Episode(0, [float(self.steps)]))
        self.buffer.append(Transition(torch.tensor(self.steps), 1.5))
        self.folder = self.folder / "below"
        return [
            self.rng.random(),
            float(self.numpy.random()),
            float(torch.rand((), generator=self.torch)),
            float(self.legacy.rand()),
        ]


def written(state: Any) -> Any:
    """As it comes back from a rank's file, which is read without running code."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_everything_goes_on_in_another_process() -> None:
    first, kept = Keeper(), Attributes()
    kept.watch("keeper", first)
    for _ in range(3):
        first.step()
    state = written(kept.state())

    second, again = Keeper(), Attributes()
    again.watch("keeper", second)
    weights, generator, alias = second.weights, second.rng, second.alias
    again.restore(state)
    assert first.step() == second.step()
    for name in ("steps", "stats", "folder", "seen", "never"):
        assert getattr(first, name) == getattr(second, name), name
    assert vars(first.mean) == vars(second.mean)
    assert second.hidden is not None
    assert torch.equal(second.hidden, torch.full((2,), 4.0))
    assert (second.array == first.array).all()
    assert [int(one) for one in second.replay] == [3, 4]
    assert first.episode == second.episode
    assert second.current is second.episode, "the one that another attribute holds"
    assert first.episodes == second.episodes
    assert [(type(one), int(one.state), one.reward) for one in second.buffer] == [
        (Transition, 3, 1.5),
        (Transition, 4, 1.5),
    ]
    assert second.replay.maxlen == 2
    assert second.weights is weights, "others may hold the tensor"
    assert second.rng is generator
    assert second.alias is alias is second.stats["loss"]
    assert kept.unsaved == again.unsaved == {}


def test_only_what_has_changed_is_saved() -> None:
    keeper, kept = Keeper(), Attributes()
    kept.watch("keeper", keeper)
    assert kept.state() == {}
    keeper.steps = 2
    keeper.mean.history.append(1.0)
    assert kept.state() == {"keeper": [(("", "steps"), ("value", 2)), (("mean", "history"), ("value", [1.0]))]}


def test_what_cannot_be_saved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper: Any = Keeper()
    kept = Attributes()
    kept.watch("callback Ema", keeper)
    keeper.file = io.StringIO()
    keeper.graph = (torch.ones(1, requires_grad=True) * 2,)
    monkeypatch.setattr(attributes, "MOST_BYTES", 1 << 20)
    keeper.large = torch.zeros(1 << 20)
    kept.state()
    assert kept.unsaved == {
        "callback Ema.file": "it is a StringIO, which is no plain data",
        "callback Ema.graph": "it[0] is a tensor with the graph that computed it: detach it",
        "callback Ema.large": "it has 4 MiB, and at most 1 are saved",
    }


class Node:
    """Holds its holder."""

    def __init__(self) -> None:
        self.parent: Node | None = None
        self.value = 0


def test_what_holds_itself_is_named_where_it_changes() -> None:
    keeper: Any = Mean()
    keeper.tree, keeper.list = [Node()], [1]
    keeper.tree[0].parent = keeper.tree[0]
    kept = Attributes()
    kept.watch("model", keeper)
    assert kept.state() == {}
    keeper.tree[0].value = 1
    keeper.list.append(keeper.list)
    kept.state()
    assert kept.unsaved == {"model.tree": "it[0] is a Node, which is no plain data", "model.list": "it holds itself"}


def test_a_metric_in_a_dict_that_no_module_knows_is_named() -> None:
    """torchmetrics keeps its sums in attributes, and the dict makes it no submodule: Lightning saves nothing of it."""
    from torchmetrics import MeanMetric

    class Net(nn.Module): ...

    model: Any = Net()
    model.metrics = {"mean": MeanMetric()}
    kept = Attributes()
    kept.watch("model", model)
    model.metrics["mean"].update(2.0)
    assert kept.state() == {}
    assert list(kept.unsaved) == ["model.metrics"]


def test_a_class_that_is_not_here_is_named() -> None:
    first, kept = Keeper(), Attributes()
    kept.watch("keeper", first)
    first.step()
    state = kept.state()
    (episodes,) = [value for path, (_, value) in state["keeper"] if path == ("", "episodes")]
    episodes[0]["state"][1] = "Gone"
    second, again = Keeper(), Attributes()
    again.watch("keeper", second)
    again.restore(written(state))
    assert "there is no class" in again.unsaved["keeper.episodes"]
    assert second.steps == 1


class Mode(enum.Enum):
    WARM = 1
    HOT = 2


class Meter:
    """Gives its state itself."""

    def __init__(self) -> None:
        self.total = 0

    def state_dict(self) -> dict[str, int]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.total = state["total"]


@dataclasses.dataclass(frozen=True)
class Stage:
    rate: float


class Values:
    """What is less common than lists and numbers."""

    def __init__(self) -> None:
        self.mode = Mode.WARM
        self.scale = np.float32(1.0)
        self.stage = Stage(0.1)
        self.since: Any = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
        self.price, self.part, self.span = decimal.Decimal("1.5"), fractions.Fraction(1, 3), range(3)
        self.buffer = bytearray(b"ab")
        self.names = np.array(["a", "b"])
        self.counts = {"train": Counter({np.int64(3): 1})}
        self.order = OrderedDict(a=1, b=2)
        self.groups: Any = defaultdict(lambda: defaultdict(list))
        self.by_mode: dict[Mode, float] = {}
        self.meter = Meter()
        self.teacher = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.teacher.parameters(), lr=0.1, momentum=0.9)

    def step(self) -> None:
        self.mode, self.scale = Mode.HOT, np.float32(0.3)
        self.stage = Stage(0.2)
        self.since += datetime.timedelta(hours=1)
        self.price, self.part, self.span = self.price * 2, self.part * 2, range(4)
        self.buffer += b"c"
        self.names = np.array(["c", "d"])
        self.counts["train"][np.int64(4)] += 2
        self.counts["val"] = Counter({np.int64(1): 1})
        self.order.move_to_end("a")
        self.groups["x"][(1, "y")].append(2)
        self.by_mode[Mode.HOT] = 0.5
        self.meter.total = 7
        self.teacher(torch.ones(2)).sum().backward()
        self.optimizer.step()


def test_values_of_less_common_kinds_come_back_as_what_they_were() -> None:
    first, second, kept, again = Values(), Values(), Attributes(), Attributes()
    kept.watch("values", first)
    again.watch("values", second)
    assert kept.state() == {}
    first.step()
    stage, inner, teacher = second.stage, second.counts["train"], second.teacher
    again.restore(written(kept.state()))
    assert kept.unsaved == again.unsaved == {}
    for name in ("mode", "scale", "since", "price", "part", "span", "buffer", "counts", "order", "stage"):
        assert getattr(second, name) == getattr(first, name), name
        assert type(getattr(second, name)) is type(getattr(first, name)), name
    assert (second.groups, second.by_mode) == (first.groups, first.by_mode)
    assert (Mode.WARM.value, stage.rate) == (1, 0.1)
    assert list(second.names) == ["c", "d"]
    assert list(second.order) == ["b", "a"]
    assert second.counts["train"] is inner
    assert [int(one) for pair in second.counts["val"].most_common() for one in pair] == [1, 1]
    second.groups["x"]["new"].append(1)
    second.groups["new"]["x"].append(1)
    assert second.meter.total == 7
    assert second.teacher is teacher
    assert torch.equal(teacher.weight, first.teacher.weight)
    (mine,), (theirs,) = (list(one.optimizer.state.values())[:1] for one in (second, first))
    assert torch.equal(mine["momentum_buffer"], theirs["momentum_buffer"])


def test_an_iterator_that_is_kept_is_named() -> None:
    """It goes on without a trace: the attribute is the same object as before."""
    keeper: Any = Mean()
    keeper.numbers, keeper.made = iter(range(10)), (one for one in range(10))
    kept = Attributes()
    kept.watch("model", keeper)
    next(keeper.numbers)
    kept.state()
    assert kept.unsaved == {
        "model.numbers": "it is a range_iterator, which is no plain data",
        "model.made": "it is a generator, which is no plain data",
    }


def test_a_list_of_submodules_is_none_of_its_own() -> None:
    """Lightning saves their weights: the list is no second copy of them, and nothing that would have to be named."""
    keeper: Any = Mean()
    keeper.parts = [nn.Linear(2, 2)]
    kept = Attributes()
    kept.exclude(keeper.parts[0])
    kept.watch("model", keeper)
    with torch.no_grad():
        keeper.parts[0].weight += 1
    assert kept.state() == kept.unsaved == {}


def test_a_state_that_cannot_be_given_is_named() -> None:
    keeper: Any = Mean()
    keeper.meter = Meter()
    kept = Attributes()
    kept.watch("model", keeper)
    del keeper.meter.total
    assert kept.state() == {}
    assert kept.unsaved["model.meter"].startswith("its state_dict fails: AttributeError")


def test_what_cannot_be_put_back_is_named_and_the_rest_is() -> None:
    """A resume does not fail for it."""

    @dataclasses.dataclass(frozen=True)
    class Last:
        step: int

    class Noting:
        def __init__(self) -> None:
            self.last, self.steps = Last(0), 0

    Last.__module__ = "mine"
    first, second = Noting(), Noting()
    kept, again = Attributes(), Attributes()
    kept.watch("callback Noting", first)
    again.watch("callback Noting", second)
    first.last, first.steps = Last(3), 3
    again.restore(kept.state())
    assert second.steps == 3
    assert list(again.unsaved) == ["callback Noting.last"]
    assert "there is no class mine." in again.unsaved["callback Noting.last"]


class Settings(dict[str, Any]):
    """No code but the user's makes one."""


class AttributeDict(dict[str, Any]):
    """A fake of Lightning's, which these tests do not need for anything else."""

    __module__ = "lightning.fabric.utilities.data"


@pytest.mark.parametrize("kind", [Settings, AttributeDict])
@pytest.mark.parametrize("inside", [False, True], ids=["itself", "in a dict"])
def test_settings_of_another_class_than_dict_stay_what_they_are(inside: bool, kind: type[dict[str, Any]]) -> None:
    """A finder sets the batch size in the hyperparameters."""

    def make() -> tuple[Any, dict[str, Any]]:
        holder, settings = Mean(), kind(batch_size=2, width=3)
        vars(holder)["hparams"] = {"net": settings} if inside else settings
        return holder, settings

    (holder, settings), (later, other) = make(), make()
    watched, again = Attributes(), Attributes()
    watched.watch("model", holder)
    settings["batch_size"] = 8
    again.watch("model", later)
    again.restore(written(watched.state()))
    assert other == {"batch_size": 8, "width": 3}
    assert again.unsaved == {}


def test_settings_that_are_not_there_are_named() -> None:
    holder, later, watched, again = Mean(), Mean(), Attributes(), Attributes()
    watched.watch("model", holder)
    again.watch("model", later)
    vars(holder)["hparams"] = Settings(batch_size=2)
    again.restore(watched.state())
    assert list(again.unsaved) == ["model.hparams"]


def test_a_class_names_what_is_kept() -> None:
    class Choosy:
        resume_attributes = ("wanted",)

        def __init__(self) -> None:
            self.wanted = self.other = 0

    first, kept = Choosy(), Attributes()
    kept.watch("one", first)
    first.wanted = first.other = 1
    assert kept.state() == {"one": [(("", "wanted"), ("value", 1))]}


def test_an_averaged_model_is_kept_by_its_state_dict() -> None:
    class Ema:
        def __init__(self) -> None:
            self.shadow = nn.Linear(2, 2)

    torch.manual_seed(0)
    first, second = Ema(), Ema()
    kept, again = Attributes(), Attributes()
    kept.watch("ema", first)
    again.watch("ema", second)
    assert kept.state() == {}
    with torch.no_grad():
        first.shadow.weight.mul_(2)
    again.restore(written(kept.state()))
    assert torch.equal(first.shadow.weight, second.shadow.weight)


def test_modules_keep_their_own_attributes_and_hidden_buffers() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.count = 0
            self.saved: Tensor
            self.hidden: Tensor
            self.register_buffer("saved", torch.zeros(1))
            self.register_buffer("hidden", torch.zeros(1), persistent=False)

    first, second = Net(), Net()
    kept, again = Attributes(), Attributes()
    for one, net in ((kept, first), (again, second)):
        one.exclude(*net.modules())
        one.watch("model", net)
    first.count = 3
    with torch.no_grad():
        for changed in (first.layer.weight, first.saved, first.hidden):
            changed.add_(1)
    state = kept.state()
    assert [path for path, _ in state["model"]] == [("", "count"), ("", "hidden")], "the rest is in the state_dict"
    again.restore(written(state))
    assert (second.count, second.hidden.item()) == (3, 1.0)


def test_what_is_not_there_yet_is_put_back_when_it_is() -> None:
    first, kept = Keeper(), Attributes()
    kept.watch("loader 0 dataset", first)
    first.steps = 7
    again, second = Attributes(), Keeper()
    again.restore(kept.state())
    again.watch("loader 0 dataset", second)
    assert second.steps == 7


def test_an_object_that_is_watched_again_stays_watched_from_its_beginning() -> None:
    """A loader is made anew for each epoch, over one dataset or over another."""
    dataset, kept = Keeper(), Attributes()
    kept.watch("loader 0 dataset", dataset)
    dataset.steps = 7
    kept.watch("loader 0 dataset", dataset)
    assert kept.state()["loader 0 dataset"] == [(("", "steps"), ("value", 7))]
    assert kept.replaced == set()
    kept.watch("loader 0 dataset", Keeper())
    assert kept.state() == {}
    assert kept.replaced == {"loader 0 dataset"}


def test_what_has_changed_once_is_kept_also_as_it_was_first() -> None:
    first, kept = Keeper(), Attributes()
    kept.watch("callback", first)
    before = first.steps
    first.steps = 7
    kept.state()
    first.steps = before
    assert kept.state()["callback"] == [(("", "steps"), ("value", before))]


def test_a_state_stays_what_it_is_when_it_was_put_back() -> None:
    """It may be put back once more: for the loaders, and where the training goes on."""
    first, second, kept, again = Keeper(), Keeper(), Attributes(), Attributes()
    kept.watch("model", first)
    again.watch("model", second)
    first.step()
    state = kept.state()
    for _ in range(2):
        again.restore(state)
        assert torch.equal(second.hidden, torch.full((2,), 1.0))  # type: ignore[arg-type]
        second.hidden.zero_()  # type: ignore[union-attr]


class Agent:
    """What its attributes share is made by the constructor, or by the training."""

    of_all: ClassVar = [[1]]

    def __init__(self) -> None:
        self.best = self.now = [0]
        self.copied: list[int] | None = None
        self.history: list[list[int]] = []
        self.weight = torch.zeros(3)
        self.view = self.weight[1:]
        self.steps: Any = {"a": deque([1])}
        self.low = self.high = [0]
        self.first = [1]
        self.table = {"first": self.first}
        self.lookup = {"k": [3]}
        self.picked: list[int] | None = None

    def train(self) -> None:
        """Unties what was one, and ties what was not; some of it with equal contents."""
        self.low = [0]
        self.first = [2]
        self.picked = self.lookup["k"]
        self.best = [*self.now, 7]
        self.copied = self.now
        self.history += [self.now, self.best, *self.of_all]
        self.weight += 1
        self.steps["b"] = self.steps["a"]

    def go_on(self) -> Any:
        """What becomes of it depends on what is one object."""
        self.now.append(5)
        self.best.append(6)
        self.view.add_(2)
        self.steps["b"].append(2)
        self.low.append(8)
        self.lookup["k"].append(9)
        return {name: one.tolist() if isinstance(one, torch.Tensor) else one for name, one in vars(self).items()}


def test_attributes_that_share_an_object_share_it_after_a_resume() -> None:
    first, second, kept, again = Agent(), Agent(), Attributes(), Attributes()
    now = second.now
    kept.watch("model", first)
    again.watch("model", second)
    kept.begun()
    first.train()
    again.restore(written(kept.state()))
    assert second.now is now
    assert second.go_on() == first.go_on()
    assert (kept.unsaved, again.unsaved) == ({}, {})
