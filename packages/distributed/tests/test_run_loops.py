"""Loops as people write them: with several loaders, epochs of their own, and mistakes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fairlead import Run
from fairlead.config import TrainerConfig
from fairlead.errors import ConfigError
from fairlead_runs.commit import list_checkpoints
from fairlead_runs.heartbeat import read_heartbeats

Step = Callable[..., None]
EVERY = {"every_n_steps": 1, "every_n_epochs": None}


class InterruptedHereError(Exception):
    """Takes the place of a kill."""


def loader(samples: int, **more: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(float(samples)).view(-1, 1)), 4, shuffle=True, **more)


def zipped(run: Run, step: Step) -> None:
    for (a,), (b,) in zip(run.batches(loader(22)), run.batches(loader(13), name="b"), strict=False):
        step(a, b)


def asked_within(run: Run, step: Step) -> None:
    others = run.batches(loader(13), name="b")
    for (a,) in run.batches(loader(22)):
        step(a, *next(others))


def several_steps_of_another(run: Run, step: Step) -> None:
    others = run.batches(loader(13), name="b")
    for (a,) in run.batches(loader(22)):
        for _ in range(2):
            step(*next(others))
        step(a)


def one_after_the_other(run: Run, step: Step) -> None:
    for _ in run.epochs():
        for (a,) in run.batches(loader(22)):
            step(a)
        for (b,) in run.batches(loader(13), name="b"):
            step(b)


def trained(
    root: Path, loop: Callable[[Run, Step], None], kill_at: int, most: int = 13, checkpoint: Any = EVERY
) -> list[list[float]]:
    """What the model has seen, in order; `kill_at` is the step in the middle of which the process would be killed."""
    torch.manual_seed(1)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Run(root, model=model, optimizer=optimizer, max_steps=most, checkpoint=checkpoint) as run:
        run.state["seen"] = []
        run.restore()

        def step(*batches: Tensor) -> None:
            if run.steps + 1 == kill_at:
                raise InterruptedHereError
            run.state["seen"].append(torch.cat(batches).flatten().tolist())
            run.step()

        loop(run, step)
    seen: list[list[float]] = run.state["seen"]
    return seen


@pytest.mark.parametrize("loop", [zipped, asked_within, several_steps_of_another, one_after_the_other])
def test_loops_over_several_loaders_lose_no_batch(tmp_path: Path, loop: Callable[[Run, Step], None]) -> None:
    """Interrupted in each step of the epochs' first ends: the shorter loader's end is within the longer one's epoch."""
    whole = trained(tmp_path / "whole", loop, 0)
    for kill_at in (5, 7, 8):
        with pytest.raises(InterruptedHereError):
            trained(tmp_path / str(kill_at), loop, kill_at)
        assert trained(tmp_path / str(kill_at), loop, 0) == whole


def test_max_steps_at_the_end_of_an_epoch_end_the_epoch_too(tmp_path: Path) -> None:
    """More of them then go on with the next one."""

    def once(run: Run, step: Step) -> None:
        for _ in run.epochs():
            for (a,) in run.batches(loader(22)):
                step(a)
            run.state["ends"] = [*run.state.get("ends", []), run.steps]

    whole = trained(tmp_path / "whole", once, 0, most=12)
    trained(tmp_path / "more", once, 0, most=6)
    assert trained(tmp_path / "more", once, 0, most=12) == whole


def named(run: Run, step: Step) -> None:
    for (a,) in run.batches(loader(13), name="text"):
        step(a)


def in_turn(run: Run, step: Step) -> None:
    for (a,) in run.batches(loader(13), name="first"):
        step(a)
        if run.steps == 6:
            break
    for (a,) in run.batches(loader(13), name="second"):
        step(a)


@pytest.mark.parametrize(("loop", "steps"), [(named, [8, 13]), (zipped, [12, 13]), (in_turn, [10, 13])])
def test_every_n_epochs_are_those_of_the_loop(
    tmp_path: Path, loop: Callable[[Run, Step], None], steps: list[int]
) -> None:
    """Of the loader that leads, whatever its name; not of one that ends within the epochs of another."""
    trained(tmp_path, loop, 0, checkpoint={"every_n_steps": None, "every_n_epochs": 2, "keep_last": 9})
    assert [one.step for one in list_checkpoints(tmp_path / "checkpoints")] == steps


def opened(root: Path, **more: Any) -> Iterator[Run]:
    torch.manual_seed(1)
    model = nn.Linear(1, 1)
    with Run(root, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **more) as run:
        run.restore()
        yield run


def test_an_error_that_is_caught_ends_its_phase(tmp_path: Path) -> None:
    phases = []
    for run in opened(tmp_path, max_steps=2):
        for _ in run.batches(loader(8)):
            phases += [beat.phase for beat in read_heartbeats(run.path / "heartbeats")]
            with suppress(InterruptedHereError), run.phase("validate"):
                raise InterruptedHereError
            run.step()
    assert phases == ["first-batch", "train"]


def evaluated_by_batches(root: Path) -> None:
    for run in opened(root):
        for _ in run.epochs(2):
            assert len(list(run.batches(loader(8)))) == 2
            list(run.batches(loader(4)))


def epochs_of_its_own(root: Path) -> None:
    for run in opened(root, max_epochs=2):
        for _ in range(2):
            list(run.batches(loader(8)))


def nothing(root: Path) -> None:
    for run in opened(root):
        list(run.batches(loader(3, drop_last=True)))


def beyond_their_epoch(root: Path) -> None:
    for run in opened(root):
        others = run.batches(loader(40), name="b")
        for _ in run.epochs(2):
            for _ in run.batches(loader(8)):
                next(others)
                run.step()


def given(root: Path, one: object) -> None:
    for run in opened(root, max_epochs=2):
        for _ in run.batches(one):  # type: ignore[arg-type]
            run.step()


def half_an_epoch(root: Path) -> None:
    for run in opened(root):
        next(run.epochs(2.5))  # type: ignore[arg-type]


def due_at_no_step(root: Path) -> None:
    for run in opened(root):
        run.due(every=0)


def no_number(root: Path) -> None:
    for run in opened(root, config={"out": root}):
        run.log(loss=1.0, who="me")


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        (evaluated_by_batches, r"(?s)the loader 'train' has given all its batches already.*for x, y in held_out"),
        (epochs_of_its_own, r"(?s)goes over all epochs by itself.*for epoch in run.epochs\(10\)"),
        (nothing, "the loader 'train' gave no batch"),
        (beyond_their_epoch, "'b' are taken beyond the epoch in which they began"),
        (lambda root: given(root, map(list, loader(8))), "gave no batch in epoch 1\n.*\n.*an iterator, which gives"),
        (lambda root: given(root, None), "None is given as the loader 'train'"),
        (half_an_epoch, "2.5 is not an integer of at least 0"),
        (due_at_no_step, "0 is not an integer of at least 1"),
        (no_number, "the metric 'who' is not one number"),
    ],
)
def test_what_would_train_or_save_something_else_is_an_error(
    tmp_path: Path, loop: Callable[[Path], None], said: str
) -> None:
    """A validation over nothing, epochs that pass before the loop's first one is over: they would say nothing."""
    with pytest.raises(ConfigError, match=said):
        loop(tmp_path / "run")
    file = tmp_path / "run" / "metrics.csv"
    assert not file.exists() or "me" not in file.read_text()


def test_what_a_loop_keeps_from_the_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Batches from elsewhere."""
    for run in opened(tmp_path / "elsewhere"):
        for _ in run.epochs(1):
            for _ in loader(8):
                run.step()
    assert capsys.readouterr().out.count("not exact, because of the position in an epoch") == 1


def test_epochs_of_a_second_phase_are_none_of_the_run_also_when_it_resumes_there(tmp_path: Path) -> None:
    def trained(root: Path, most: int) -> tuple[int, int]:
        for run in opened(root, max_steps=most):
            for _ in run.batches(loader(8)) if run.steps < 2 else ():
                run.step()
                if run.steps == 2:
                    break
            for _ in run.batches(loader(8), name="fine"):
                run.step()
        return run.steps, run.epoch

    trained(tmp_path / "resumed", 3)
    assert trained(tmp_path / "resumed", 12) == trained(tmp_path / "undisturbed", 12)


def test_a_loop_that_counts_no_step_is_warned_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Within an epoch nothing of it is saved, and `max_steps` would never come."""
    for run in opened(tmp_path, max_epochs=3):
        for _ in run.batches(loader(8)):
            pass
    assert capsys.readouterr().out.count("run.step() was not called") == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"batch_policy": "keep"}, r"(?s)'keep': it should be 'keep_global' or 'keep_per_device'.*Run, batch_policy"),
        ({"requeue": "slrum"}, r"(?s)unknown requeue 'slrum'.*did you mean 'slurm'"),
        ({"loggers": [{"name": "csv", "row": 1}]}, r"(?s)unknown field 'row'.*Run, loggers\[0\].row"),
        ({"loggers": "csv"}, "loggers is the text 'csv': it should be a list"),
        ({"local_buffers": "queue"}, "local_buffers is the text 'queue': it should be a list"),
        ({"on_divergence": "warn"}, "on_divergence is the text 'warn': it should be 'error', 'warning' or 'ignore'"),
        ({"checkpoint": {"every_n_step": 3}}, r"(?s)'every_n_step'.*Run, checkpoint.every_n_step.*'every_n_steps'"),
        ({"checkpoint": 3}, r"(?s)checkpoint is 3: it should be a mapping .*Run, checkpoint"),
        ({"copy_to": 3}, r"(?s)url is 3: it should be text.*copy_to, url"),
        ({"config": "model.yaml"}, "config is 'model.yaml': it should be a Mapping"),
        ({"per_rank": [3]}, r"per_rank is \[3\]: it should be a Mapping"),
        ({"finite": "no"}, "finite is 'no': it should be a bool"),
    ],
)
def test_a_wrong_argument_is_named(tmp_path: Path, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Run(tmp_path / "run", **wrong)


def test_settings_in_the_place_of_the_runs_folder_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"TrainerConfig\(.*is neither a path nor a RunConfig"):
        Run(TrainerConfig())  # type: ignore[arg-type]
