"""What loops keep beside weights and batches: killed or stopped at each place, they end with the same bits."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fairlead import Run

Loop = Callable[[Path, Callable[[], None]], Any]


class KilledError(Exception):
    """Takes the place of a kill."""


def data(samples: int = 12) -> DataLoader[Any]:
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(5))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4, shuffle=True)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.1), nn.Linear(6, 1))


def loss_of(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.mse_loss(module(x), y)


def weights(*modules: nn.Module) -> list[Any]:
    return [one.tolist() for module in modules for one in module.state_dict().values()]


def step_of(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def body_behind_the_last_step(root: Path, mark: Callable[[], None]) -> Any:
    """`max_steps` ends the training within the second epoch, and the validation behind its batches is part of it."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 0.02)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    every, held_out = {"every_n_steps": 1}, next(iter(data()))
    with Run(root, m=net, o=optimizer, s=schedule, max_steps=5, checkpoint=every) as run:
        run.state["best"] = 1e9
        run.restore()
        for _ in run.epochs():
            for x, y in run.batches(data()):
                mark()
                step_of(optimizer, loss_of(net, x, y))
                run.step()
            mark()
            schedule.step()
            with torch.no_grad():
                run.state["best"] = min(run.state["best"], loss_of(net.eval(), *held_out).item())
            net.train()
    return weights(net), schedule.state_dict(), run.state, run.steps, run.epoch


def optimizer_that_waits(root: Path, mark: Callable[[], None]) -> Any:
    """The second one steps every third time, with the gradients of all steps since."""
    first, second = model(), nn.Linear(1, 1)
    often, seldom = torch.optim.Adam(first.parameters(), 0.02), torch.optim.SGD(second.parameters(), 0.1, momentum=0.9)
    every = {"every_n_steps": 1}
    with Run(root, a=first, b=second, o=often, p=seldom, max_steps=7, checkpoint=every) as run:
        run.restore()
        for x, y in run.batches(data()):
            mark()
            loss_of(nn.Sequential(first, second), x, y).backward()  # type: ignore[no-untyped-call]
            often.step()
            often.zero_grad()
            if run.steps % 3 == 2:
                seldom.step()
                seldom.zero_grad()
            run.step()
    return weights(first, second)


def layer_that_is_left_out(root: Path, mark: Callable[[], None]) -> Any:
    """With gradients of zero its momentum moves it; without gradients it would stay as it is."""
    net = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)])
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    with Run(root, m=net, o=optimizer, max_steps=7, checkpoint={"every_n_steps": 1}) as run:
        run.restore()
        for x, y in run.batches(data()):
            mark()
            optimizer.zero_grad(set_to_none=False)
            hidden = net[0](x)
            hidden = hidden + net[1](hidden) if run.steps % 3 == 0 else hidden
            functional.mse_loss(net[2](hidden), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            run.step()
    return weights(net)


def optimizer_of_a_part(root: Path, mark: Callable[[], None]) -> Any:
    """Nothing frees the gradients of the other layers, and the norm that is clipped counts them."""
    net = model()
    optimizer = torch.optim.Adam(net[0].parameters(), 0.02)
    with Run(root, m=net, o=optimizer, max_steps=7, checkpoint={"every_n_steps": 1}) as run:
        run.restore()
        for x, y in run.batches(data()):
            mark()
            optimizer.zero_grad()
            loss_of(net, x, y).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            run.step()
    return weights(net)


def accumulated_over_the_epoch(root: Path, mark: Callable[[], None]) -> Any:
    """Two batches to a step, three to an epoch: a step's gradients are of two epochs."""
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    with Run(root, m=net, o=optimizer, checkpoint={"every_n_steps": 1, "every_n_epochs": 1}) as run:
        run.state["batches"] = 0
        run.restore()
        for _ in run.epochs(4):
            for x, y in run.batches(data()):
                mark()
                loss_of(net, x, y).backward()  # type: ignore[no-untyped-call]
                run.state["batches"] += 1
                if run.state["batches"] % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    run.step()
            mark()
    return weights(net), run.steps


class Counts(nn.Module):
    """A counter, a rate that it changes, and a buffer that no `state_dict` has."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)
        self.net = nn.Sequential(nn.Linear(4, 6), self.dropout, nn.Linear(6, 1))
        self.calls = 0
        self.register_buffer("seen", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        self.seen += 0.01
        self.dropout.p = min(0.5, 0.02 * self.calls)
        return self.net(x) * (1 + self.seen)


def module_with_counters(root: Path, mark: Callable[[], None]) -> Any:
    net = Counts()
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    with Run(root, m=net, o=optimizer, max_steps=7, checkpoint={"every_n_steps": 2}) as run:
        run.restore()
        for x, y in run.batches(data()):
            mark()
            step_of(optimizer, loss_of(net, x, y))
            run.step()
    return weights(net), net.calls, net.seen.tolist(), net.dropout.p


class Remembers(Dataset[Any]):
    """A generator, noise that is drawn once for each sample, and a level that the loop raises."""

    def __init__(self) -> None:
        self.samples: Any = data().dataset
        self.random = np.random.default_rng(7)
        self.noise: dict[int, float] = {}
        self.level = 0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        x, y = self.samples[index]
        return x * (1 + self.level) + self.noise.setdefault(index, self.random.normal()), y


def with_dataset(root: Path, mark: Callable[[], None], *, counts: bool) -> Any:
    net, dataset = model(), Remembers()
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    with Run(root, m=net, o=optimizer, checkpoint={"every_n_steps": 2}) as run:
        run.restore()
        for epoch in run.epochs(3):
            if not counts:
                dataset.level = epoch
            for x, y in run.batches(DataLoader(dataset, batch_size=4, shuffle=True)):
                mark()
                step_of(optimizer, loss_of(net, x.float(), y))
                run.step()
            dataset.level += counts
            mark()
    return weights(net)


def dataset_that_remembers(root: Path, mark: Callable[[], None]) -> Any:
    """What the samples, and the loop, change in the dataset counts for the samples that come."""
    return with_dataset(root, mark, counts=True)


def dataset_that_is_told_the_epoch(root: Path, mark: Callable[[], None]) -> Any:
    """What the loop sets before an epoch's batches stays, beside what the dataset keeps by itself."""
    return with_dataset(root, mark, counts=False)


def generator_and_discriminator(root: Path, mark: Callable[[], None]) -> Any:
    """Each second step the generator's loss leaves gradients in the discriminator, whose optimizer adds to them."""
    generator, discriminator = model(), nn.Linear(1, 1)
    seldom, often = torch.optim.Adam(generator.parameters(), 0.02), torch.optim.Adam(discriminator.parameters(), 0.02)
    with Run(
        root, g=generator, d=discriminator, a=seldom, b=often, max_steps=7, checkpoint={"every_n_steps": 1}
    ) as run:
        run.restore()
        for x, y in run.batches(data()):
            mark()
            (discriminator(generator(x).detach()) - discriminator(y)).mean().backward()
            often.step()
            often.zero_grad()
            if run.steps % 2:
                discriminator(generator(x)).mean().backward()
                seldom.step()
                seldom.zero_grad()
            run.step()
    return weights(generator, discriminator)


class Slowing(torch.optim.Optimizer):
    """What it counts and averages is in attributes, of which torch's `state_dict` knows nothing."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.count, self.mean = 0, torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for one in self.param_groups[0]["params"]:
            self.mean = 0.9 * self.mean + one.grad.abs().mean()
            one.sub_(one.grad, alpha=self.param_groups[0]["lr"] / (self.count + self.mean.item()))


def optimizer_with_attributes(root: Path, mark: Callable[[], None]) -> Any:
    net = model()
    optimizer = Slowing(net.parameters())
    with Run(root, m=net, o=optimizer, max_steps=5, checkpoint={"every_n_steps": 2}) as run:
        run.restore()
        for x, y in run.batches(data()):
            mark()
            step_of(optimizer, loss_of(net, x, y))
            run.step()
    return weights(net), optimizer.count


def shorter_loader_first(root: Path, mark: Callable[[], None]) -> Any:
    """The longer one stands within its epoch when that of the run ends."""
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    with Run(root, m=net, o=optimizer, checkpoint={"every_n_steps": 2}) as run:
        run.restore()
        for _ in run.epochs(3):
            for (x, _), (_, y) in zip(run.batches(data(8)), run.batches(data(16), name="other"), strict=False):
                mark()
                step_of(optimizer, loss_of(net, x, y))
                run.step()
            mark()
    return weights(net), run.steps


def state_that_the_loop_holds(root: Path, mark: Callable[[], None]) -> Any:
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    with Run(root, m=net, o=optimizer, max_steps=6) as run:
        losses = run.state["losses"] = []
        run.state["warm"] = True
        run.restore()
        for x, y in run.batches(data()):
            mark()
            loss = loss_of(net, x, y)
            step_of(optimizer, loss)
            losses.append(loss.item())
            run.state.pop("warm", None)
            run.step()
    return weights(net), dict(run.state)


@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize(
    "loop",
    [
        body_behind_the_last_step,
        optimizer_that_waits,
        layer_that_is_left_out,
        optimizer_of_a_part,
        accumulated_over_the_epoch,
        module_with_counters,
        dataset_that_remembers,
        dataset_that_is_told_the_epoch,
        generator_and_discriminator,
        optimizer_with_attributes,
        shorter_loader_first,
        state_that_the_loop_holds,
    ],
)
def test_a_loop_ends_with_the_same_bits(tmp_path: Path, loop: Loop, how: str) -> None:
    """Compared with the one that nothing disturbs; a checkpoint after a step or two, so that each differs."""

    def run(name: str, disturbed: int = -1) -> tuple[Any, int]:
        marks = 0

        def mark() -> None:
            nonlocal marks
            marks += 1
            if marks == disturbed and how == "killed":
                raise KilledError
            if marks == disturbed:
                os.kill(os.getpid(), signal.SIGUSR1)

        torch.manual_seed(1)
        return loop(tmp_path / name, mark), marks

    expected, marks = run("undisturbed")
    for at in range(1, marks + 1):
        with suppress(KilledError, SystemExit):
            run(str(at), at)
        assert run(str(at))[0] == expected, f"{how} at {at} of {marks}"
        exactness = (tmp_path / str(at)).glob("starts/*/exactness.json")
        assert all('"exact": true' in one.read_text() for one in exactness)


def test_without_an_optimizer_a_checkpoint_has_no_gradients(tmp_path: Path) -> None:
    """The loop frees them, which Run cannot see; that its optimizer is missing is a reason of its own."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.02)
    with Run(tmp_path, m=net, max_epochs=1, checkpoint={"every_n_steps": 1}) as run:
        run.restore()
        for x, y in run.batches(data()):
            step_of(optimizer, loss_of(net, x, y))
            run.step()
    saved = [torch.load(one) for one in tmp_path.glob("checkpoints/step-*/rank-*.pt")]
    assert saved
    assert all(one["gradients"] == {} for one in saved)
    assert '"exact": false' in (tmp_path / "starts/1/exactness.json").read_text()


def test_what_is_changed_after_the_loop_is_in_the_result(tmp_path: Path) -> None:
    """Whether the last step was saved or not: the best weights, an average, a value of the loop's own."""
    for every in (1, 100):
        root, net = tmp_path / str(every), model()
        optimizer = torch.optim.SGD(net.parameters(), 0.02)
        with Run(root, m=net, o=optimizer, max_steps=2, checkpoint={"every_n_steps": every}) as run:
            run.restore()
            for x, y in run.batches(data()):
                step_of(optimizer, loss_of(net, x, y))
                run.step()
            with torch.no_grad():
                next(net.parameters()).zero_()
            run.state["best"] = 0.5
        again = model()
        with Run(root, m=again, o=torch.optim.SGD(again.parameters(), 0.02), max_steps=2) as run:
            run.restore()
        assert weights(again) == weights(net)
        assert run.state == {"best": 0.5}


def test_a_loop_with_its_own_data_saves_what_it_does_after_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """When it is told to; that a stop within `step` skips what is behind it, is said."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.02)
    with suppress(KilledError), Run(tmp_path, m=net, o=optimizer, checkpoint={"every_n_steps": 1}) as run:
        run.restore()
        run.step()
        if run.due(every=1):
            run.state["best"] = 0.5
            run.save()
        raise KilledError
    assert "because of what the loop does after run.step()" in capsys.readouterr().out
    with Run(tmp_path, m=net, o=optimizer) as run:
        run.restore()
        assert (run.steps, run.state) == (1, {"best": 0.5})
        run.finish()


def test_what_a_loop_counts_in_its_dataset_before_an_epoch_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the end of an epoch it counts anew: the dataset of this start has counted none."""
    for end in (2, 3):
        net, dataset = model(), Remembers()
        optimizer = torch.optim.SGD(net.parameters(), 0.02)
        with Run(tmp_path, m=net, o=optimizer, max_epochs=end) as run:
            run.restore()
            for _ in run.epochs():
                dataset.level += 1
                for x, y in run.batches(DataLoader(dataset, batch_size=4)):
                    step_of(optimizer, loss_of(net, x.float(), y))
                    run.step()
    assert "not known, because of loader train dataset.level (the loop sets it before" in capsys.readouterr().out


def test_an_optimizer_that_the_loop_makes_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of another model is not, nor one that a registered object steps."""

    class Wrapper:
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner
            self.state_dict, self.load_state_dict = inner.state_dict, inner.load_state_dict
            self.zero_grad = inner.zero_grad

    for other in (False, True):
        net, copied = model(), model()
        wrapped = Wrapper(torch.optim.SGD(net.parameters(), 0.02))
        elsewhere = torch.optim.SGD(copied.parameters(), 0.02)
        with Run(tmp_path / str(other), m=net, o=wrapped, max_epochs=1) as run:
            run.restore()
            made = torch.optim.Adam(net.parameters(), 0.02)
            for x, y in run.batches(data()):
                step_of(elsewhere, loss_of(copied, x, y))
                step_of(made if other else wrapped.inner, loss_of(net, x, y))
                run.step()
        text = "not known, because of an optimizer that is not registered (Adam)"
        assert (text in capsys.readouterr().out) is other


def test_what_workers_change_in_their_dataset_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each has a copy, which ends with it."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.02)
    with Run(tmp_path, m=net, o=optimizer, max_epochs=1, checkpoint={"every_n_steps": 2}) as run:
        run.restore()
        for x, y in run.batches(DataLoader(Remembers(), batch_size=2, num_workers=1)):
            step_of(optimizer, loss_of(net, x.float(), y))
            run.step()
    assert "because of what a loader's workers keep in attributes" in capsys.readouterr().out
