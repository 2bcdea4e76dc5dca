"""What is known to break an exact resume, one by one: each test fails when its remedy is taken away.

A rank ends itself at a named place (`jobs/probe.py`), so that the kill is always at the same instruction; the run is
started again, and compared bit for bit with one that was not disturbed. Settings leave out what a test is not about.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fairlead_runs.commit import list_checkpoints, newest_complete
from integration_tests.exact.cases import Case, Starter, run
from integration_tests.exact.compare import differences, recorded, scalars
from integration_tests.exact.jobs.data import Points
from integration_tests.exact.jobs.probe import KILL
from integration_tests.exact.references import Reference, References

pytestmark = pytest.mark.slow

# Nothing random happens in the steps, and the data come in one order.
STEADY = ("model.args.dropout=0.0", "data.args.noise=0.0", "data.args.shuffle=false")
EVERY_STEP = "trainer.checkpoint.every_n_steps=1"
ONLY_EPOCHS = ("trainer.checkpoint.every_n_steps=null", "trainer.checkpoint.on_validation=false")


class Killed:
    """Runs of which each was killed once."""

    def __init__(self, starter: Starter, references: References, folder: Path) -> None:
        self._starter = starter
        self._references = references
        self._folder = folder

    def at(self, case: Case, place: str) -> Path:
        """The working directory of a run that ended itself at a place, before it is started again."""
        cwd = self._folder / f"run-{len(list(self._folder.iterdir()))}"
        cwd.mkdir()
        ended = self._starter(case, cwd, {KILL: place}).end()
        assert ended.code != 0, f"it never came to {place}: {ended.text}"
        assert "finished" not in (case.directory(cwd) / "history.jsonl").read_text()
        return cwd

    def and_resumed(self, case: Case, place: str, *, step: int | None = None) -> tuple[Reference, Path]:
        """The undisturbed run, and the working directory of one that was killed at a place and started again.

        Args:
            case: The job.
            place: Where, as in `EXACT_KILL`.
            step: That of the checkpoint from which it must go on; None: any.
        """
        reference = self._references.of(case)
        cwd = self.at(case, place)
        newest = newest_complete(case.directory(cwd) / "checkpoints").checkpoint
        assert newest is not None, "it was killed before its first checkpoint"
        if step is not None:
            assert newest.step == step, "the test is about another checkpoint than the newest one"
        run(case, cwd, self._starter)
        return reference, cwd


@pytest.fixture
def killed(warm_starter: Starter, references: References, tmp_path: Path) -> Killed:
    return Killed(warm_starter, references, tmp_path)


def rows(run: Path, columns: Sequence[str]) -> list[tuple[str, ...]]:
    """The cells of some columns of metrics.csv, as text, where one of them is not blank."""
    with (run / "metrics.csv").open(newline="") as file:
        found = [tuple(row.get(name, "") for name in ("step", *columns)) for row in csv.DictReader(file)]
    return [row for row in found if any(row[1:])]


def the_same(reference: Path, run: Path) -> None:
    """Fails with what differs, by name."""
    found = differences(reference, run)
    assert not found, "\n".join(["not as if nothing had happened:", *found])


# -- 1. DDP's reduction order


@pytest.mark.full
def test_ddp_bucket_rebuild_four_ranks(killed: Killed) -> None:
    """DDP groups gradients anew after its first step: a resumed run would reduce that step in another order."""
    case = Case("mlp", ranks=4).setting(*STEADY, *ONLY_EPOCHS)
    reference, cwd = killed.and_resumed(case, "train_batch_start:12", step=8)
    the_same(reference.run, case.directory(cwd))


# -- 2. A validation that was due


@pytest.mark.parametrize(
    ("case", "place", "step"),
    [
        (Case("metrics").setting(*STEADY, EVERY_STEP), "validation_batch_start:3", 3),
        (Case("gpt").setting("model.args.dropout=0.0"), "validation_batch_start:8", 8),
    ],
    ids=["in an epoch", "counted in steps"],
)
def test_due_validation_is_rerun(killed: Killed, case: Case, place: str, step: int) -> None:
    """Killed in a validation that has a checkpoint right before it: it runs from its start, and decides as it would."""
    reference, cwd = killed.and_resumed(case, place, step=step)
    measured = rows(case.directory(cwd), ["val/loss"])
    assert measured == rows(reference.run, ["val/loss"])
    the_same(reference.run, case.directory(cwd))


@pytest.mark.parametrize(
    ("case", "places"),
    [
        (Case("metrics"), ["validation_batch_start:9", "train_batch_start:9"]),
        pytest.param(
            Case("metrics").setting("data.args.kind=stateful"),
            ["validation_batch_start:9", "train_batch_start:9"],
            marks=pytest.mark.full,
        ),
        pytest.param(
            Case("gpt", workers=2), ["validation_batch_start:16", "train_batch_start:16"], marks=pytest.mark.full
        ),
    ],
    ids=["in an epoch", "a loader with a state", "counted in steps, workers"],
)
def test_save_behind_a_rerun_validation(
    case: Case, places: list[str], warm_starter: Starter, references: References, tmp_path: Path
) -> None:
    """Killed in a validation, and again right behind the save that follows its second run.

    No batch was trained in between: that save holds the place in the data from which the start went on.
    """
    reference = references.of(case)
    for place in places:
        ended = warm_starter(case, tmp_path, {KILL: place}).end()
        assert ended.code != 0, f"it never came to {place}: {ended.text}"
    run(case, tmp_path, warm_starter)
    the_same(reference.run, case.directory(tmp_path))


@pytest.mark.full
def test_validation_batches_are_counted_on(killed: Killed) -> None:
    """What a validation logs of each batch is logged under a number that counts the batches of all validations."""
    case = Case("conv").setting("model.args.each_batch=true")
    reference, cwd = killed.and_resumed(case, "train_batch_start:8")
    counted = rows(case.directory(cwd), ["val/loss_of_batch"])
    assert len(counted) == 2 * 3
    assert counted == rows(reference.run, ["val/loss_of_batch"])
    the_same(reference.run, case.directory(cwd))


# -- 3. Means over an epoch


def test_epoch_means_survive(killed: Killed) -> None:
    """What was logged and what metrics hold of an epoch's first half counts, also if another process did it."""
    case = Case("metrics", ranks=2).setting(*STEADY, EVERY_STEP)
    reference, cwd = killed.and_resumed(case, "train_batch_start:8", step=8)
    columns = ["train/loss_epoch", "train/worst", "train/accuracy", "train/size_epoch"]
    means = rows(case.directory(cwd), columns)
    assert means == rows(reference.run, columns)
    assert len(means) > 1
    the_same(reference.run, case.directory(cwd))


def test_plateau_schedule_on_an_epoch_mean(killed: Killed) -> None:
    """The schedule that looks at the mean of an epoch that two processes trained lowers the rate when it would have."""
    case = Case("metrics").setting(*STEADY, EVERY_STEP, "model.args.by=train/worst")
    reference, cwd = killed.and_resumed(case, "train_batch_start:10", step=10)
    the_same(reference.run, case.directory(cwd))


def test_no_save_between_micro_batches(killed: Killed) -> None:
    """A checkpoint holds no gradients, so it is never written when some were added up and no step was made."""
    case = Case("conv", ranks=2).setting(EVERY_STEP, "data.args.noise=0.0", "trainer.checkpoint.keep_last=20")
    reference, cwd = killed.and_resumed(case, "train_batch_end*2:4", step=4)
    for checkpoint in list_checkpoints(reference.run / "checkpoints"):
        state = torch.load(checkpoint.path / "state.ckpt", weights_only=False)
        batches = state["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["completed"]
        assert batches % 3 == 0 or batches == 7, f"step {checkpoint.step}: {batches} batches"
    the_same(reference.run, case.directory(cwd))


# -- 4. First, middle and last batches


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (16, "default"),
        pytest.param(16, "stateful", marks=pytest.mark.full),
        pytest.param(12, "stateful", marks=pytest.mark.full),
        (12, "strided"),
        pytest.param(9, "default", marks=pytest.mark.full),
    ],
    ids=["last", "last of a loader with a state", "middle of one", "middle, own sampler", "first"],
)
def test_save_on_the_epochs_last_batch(killed: Killed, step: int, kind: str) -> None:
    """Saved behind the last, a middle and the first of 8 batches: each sample of an epoch once, each epoch once."""
    record = "model.args.record=seen"
    case = Case("mlp").setting(EVERY_STEP, "data.args.noise=0.0", f"data.args.kind={kind}", record)
    reference, cwd = killed.and_resumed(case, f"train_batch_start:{step}", step=step)
    assert _seen(cwd, 0) == _seen(reference.cwd, 0)
    the_same(reference.run, case.directory(cwd))


@pytest.mark.full
def test_what_was_measured_earlier_is_not_of_this_step(killed: Killed) -> None:
    """Steps behind a resume have not been validated: they are not rated by the validation before it."""
    sets = (EVERY_STEP, "trainer.checkpoint.keep_last=30", "trainer.checkpoint.keep_best=2")
    reference, cwd = killed.and_resumed(Case("mlp").setting(*sets), "train_batch_start:16", step=16)
    rated = [
        [(item.step, item.metadata["metrics"].get("val/loss")) for item in list_checkpoints(run / "checkpoints")]
        for run in (reference.run, Case("mlp").directory(cwd))
    ]
    assert rated[1] == rated[0]
    the_same(reference.run, Case("mlp").directory(cwd))


@pytest.mark.full
def test_no_sanity_check_in_a_run_that_goes_on(killed: Killed) -> None:
    """It would reset the counts of the validations that were done."""
    case = Case("metrics").setting("trainer.checkpoint.keep_last=30")
    reference, cwd = killed.and_resumed(case, "train_batch_start:6", step=6)
    the_same(reference.run, case.directory(cwd))


@pytest.mark.parametrize(
    ("case", "place"),
    [
        *(pytest.param(Case("conv"), f"{name}:12", marks=pytest.mark.full) for name in ("publish", "fit_end")),
        (Case("conv"), "retention:12"),
        pytest.param(Case("metrics"), "fit_end:15", marks=pytest.mark.full),
    ],
    ids=["publish", "fit_end", "retention", "stopped early"],
)
def test_killed_behind_the_last_step(killed: Killed, case: Case, place: str) -> None:
    """Nothing is left to train: retention is finished; a script finds the best checkpoint and the metrics."""
    reference, cwd = killed.and_resumed(case, place, step=int(place.partition(":")[2]))
    the_same(reference.run, case.directory(cwd))


# -- 5. Augmentation in workers, and who shards


@pytest.mark.parametrize(
    "place",
    ["train_batch_start:11", pytest.param("train_batch_start:16", marks=pytest.mark.full)],
    ids=["in an epoch", "between two"],
)
def test_worker_augmentation_is_seeded_per_sample(killed: Killed, place: str) -> None:
    """Augmentation by Python's, NumPy's and torch's global generators in two workers, which draw ahead."""
    case = Case("mlp", workers=2).setting(EVERY_STEP, "model.args.dropout=0.0", "model.args.record=seen")
    reference, cwd = killed.and_resumed(case, place)
    assert _seen(cwd, 0) == _seen(reference.cwd, 0)
    the_same(reference.run, case.directory(cwd))


@pytest.mark.parametrize("kind", ["default", "resumable"])
def test_samples_are_sharded_once(references: References, kind: str) -> None:
    """Lightning wraps samplers that it does not know, and so would shard twice: all ranks together see each sample."""
    sets = (*STEADY, "model.args.record=seen", "trainer.max_epochs=1", f"data.args.kind={kind}")
    case = Case("mlp", ranks=2).setting(*sets)
    reference = references.of(case)
    seen = [_seen(reference.cwd, rank) for rank in range(case.ranks)]
    assert [len(batches) for batches in seen] == [8, 8]
    sums = [value for batches in seen for points in batches.values() for value in points]
    expected = Points(8 * 4 * 2 - 3, (8,), seed=1).points.double().sum(dim=1).tolist()
    assert set(sums) == set(expected)
    assert len(sums) <= len(expected) + 1, "padding is one sample at most"


def _seen(cwd: Path, rank: int) -> dict[tuple[int, int], list[float]]:
    """By epoch and batch, what a rank trained on, as the sums of points; of a batch that was trained twice the last."""
    return {(line["epoch"], line["batch"]): line["points"] for line in recorded(cwd, f"seen-{rank}")}


# -- 6. Validation on several ranks


def test_sharded_validation_counts(warm_starter: Starter, tmp_path: Path) -> None:
    """One sample more than full batches: equal batch counts on all ranks, each sample once, the loss of one process."""
    ranks = 3
    values = []
    for count in (1, ranks):
        cwd = tmp_path / str(count)
        cwd.mkdir()
        case = Case("mlp", ranks=count).setting("model.args.record=seen")
        values.append(_validated(warm_starter, case, cwd, sized_for=ranks))
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    counts = [[line["size"] for line in recorded(tmp_path / str(ranks), f"seen-val-{r}")] for r in range(ranks)]
    assert {len(sizes) for sizes in counts} == {3}
    assert sum(map(sum, counts)) == 2 * 4 * ranks + 1


def _validated(starter: Starter, case: Case, cwd: Path, sized_for: int) -> float:
    """The `val/loss` that `fairlead validate` prints, of untrained weights, which the seed decides."""
    ended = starter(case.doing("validate").setting("run.resume=never"), cwd, {"EXACT_SIZED_FOR": str(sized_for)}).end()
    assert ended.code == 0, ended.text
    return float(next(line.split()[1] for line in ended.text.splitlines() if line.startswith("val/loss")))


# -- 7. metrics.csv and TensorBoard


@pytest.mark.parametrize(
    "place", ["train_batch_start:14", "publish:16"], ids=["behind the checkpoint", "right after it"]
)
def test_loggers_are_cut_back(killed: Killed, place: str) -> None:
    """Rows behind the checkpoint are cut off, rows before it are on disk: each step once, without a gap."""
    case = Case("mlp").setting("trainer.log_every_n_steps=1", "trainer.checkpoint.every_n_steps=8")
    reference, cwd = killed.and_resumed(case, place)
    run = case.directory(cwd)
    assert (run / "metrics.csv").read_bytes() == (reference.run / "metrics.csv").read_bytes()
    logged = [(tag, step, value) for tag, step, value in scalars(run) if tag != "epoch"]
    assert len({(tag, step) for tag, step, _ in logged}) == len(logged) == 24 + 3
    assert sorted(scalars(run)) == sorted(scalars(reference.run))


# -- and the generators


def test_rng_is_restored(killed: Killed) -> None:
    """Dropout and augmentation in the process itself go on with the numbers that would have come next, on each rank."""
    case = Case("mlp", ranks=2).setting(*ONLY_EPOCHS)
    reference, cwd = killed.and_resumed(case, "train_batch_start:9", step=8)
    final = f"checkpoints/step-{reference.steps:08d}"
    for rank in range(case.ranks):
        states: list[Any] = [
            torch.load(folder / final / f"rank-{rank:05d}.pt", weights_only=False)["rng"]
            for folder in (reference.run, case.directory(cwd))
        ]
        assert torch.equal(states[0]["torch"], states[1]["torch"]), f"rank {rank}"
        assert states[0]["python"] == states[1]["python"], f"rank {rank}"
    the_same(reference.run, case.directory(cwd))
