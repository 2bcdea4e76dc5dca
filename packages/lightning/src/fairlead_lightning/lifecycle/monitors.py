"""Is each metric that something monitors logged, and the same on all ranks? Does what is due at an interval ever come?

Said after the first epoch, or before it, and not when a week of training is over.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import lightning.pytorch as L
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from fairlead.config import CheckpointConfig
from fairlead.errors import RunFailedError, did_you_mean
from fairlead.findings import Finding
from fairlead_distributed.objects import gather_objects
from fairlead_distributed.run.session import RunSession
from fairlead_runs.waiting import listed

_LATER: Final = "a metric that is first measured in a later epoch has to be logged from the first one on"
_REFUSED: Final = (
    (re.compile(r"Early stopping conditioned on metric `(?P<monitor>.*?)` which is not"), "EarlyStopping"),
    (re.compile(r"ReduceLROnPlateau conditioned on metric (?P<monitor>.*?) which is not"), "ReduceLROnPlateau"),
    (re.compile(r"`ModelCheckpoint\(monitor=['\"](?P<monitor>.*?)['\"]\)` could not find"), "ModelCheckpoint"),
)
_NO_METRICS: Final = {"epoch", "step", "monitor", "EarlyStopping", "False"}  # other words in these messages
_NAME: Final = re.compile(r"[`'\"]([^`'\"]+)[`'\"]")


@dataclass(frozen=True)
class _Monitor:
    """Something that reads a metric by its name; `needed` says whether it is useless without it, and when."""

    owner: str
    metric: str
    needed: str  # "now": an epoch without it is an error; "once": the training without it; "no": a warning


class Monitors:
    """Compares what is monitored with what is logged, when an epoch and the validations that belong to it are over.

    It runs after the callbacks that save: a training that ends here has saved its state.

    Args:
        checkpoint: `trainer.checkpoint`, where checkpoints are written.
        say: Prints a finding, on rank 0.
    """

    def __init__(
        self, checkpoint: CheckpointConfig | None, session: RunSession, say: Callable[[str], None] | None = None
    ) -> None:
        self._checkpoint = checkpoint
        self._session = session
        self._say = say or print
        self._waiting: list[_Monitor] | None = None
        self._monitored: dict[str, list[str]] = {}
        self._reported: set[_Monitor] = set()
        self._validated = False
        self._epochs = 0

    def training_starts(self, trainer: L.Trainer) -> None:
        """The callbacks and the schedules of this fit are known."""
        trial = vars(trainer).get("fast_dev_run")  # Lightning declares none
        self._waiting = None if trial else list(dict.fromkeys(self._monitors(trainer)))
        self._monitored = {}
        for one in self._waiting or ():
            if one.owner != "trainer.checkpoint":  # rank 0 decides which is the best
                self._monitored.setdefault(one.metric, []).append(one.owner)
        self._validated, self._epochs = False, 0
        for finding in [] if trial else never_due(trainer):
            self._found(trainer, finding)

    def validation_ends(self, trainer: L.Trainer) -> None:
        """One that is not the check before the training."""
        self._validated = self._validated or not trainer.sanity_checking

    def epoch_starts(self, trainer: L.Trainer) -> None:
        """The epoch before has logged all that it will, and is saved."""
        if self._epochs:
            self._compare(trainer, over=False)
            self._compare_ranks(trainer)
        if self._epochs == 1:
            self._look_for_steps(trainer)
        self._epochs += 1

    def training_ends(self, trainer: L.Trainer) -> None:
        """The last epoch is over, and saved."""
        if self._epochs:
            self._compare(trainer, over=True)
            self._compare_ranks(trainer)
        if self._epochs == 1:
            self._look_for_steps(trainer)

    def _monitors(self, trainer: L.Trainer) -> Iterator[_Monitor]:
        if self._checkpoint is not None and self._checkpoint.monitor is not None:
            yield _Monitor("trainer.checkpoint", self._checkpoint.monitor, "now")
        for callback in vars(trainer)["callbacks"]:
            metric = getattr(callback, "monitor", None)
            if not isinstance(metric, str) or not metric:
                continue
            strict = isinstance(callback, ModelCheckpoint) or (isinstance(callback, EarlyStopping) and callback.strict)
            yield _Monitor(type(callback).__name__, metric, "once" if strict else "no")
        for schedule in trainer.lr_scheduler_configs:
            if schedule.reduce_on_plateau and schedule.monitor:
                name = type(schedule.scheduler).__name__
                yield _Monitor(name, schedule.monitor, "once" if schedule.strict else "no")

    def _compare(self, trainer: L.Trainer, *, over: bool) -> None:
        """The names of rank 0 decide for all: a metric may be logged there only."""
        if not self._waiting:
            return
        names: list[str] = sorted(trainer.strategy.broadcast(list(trainer.callback_metrics)))
        self._waiting = [one for one in self._waiting if one.metric not in names]
        if trainer.enable_validation and not self._validated and not over:
            return  # what is monitored may be what a validation measures
        for one in self._waiting:
            measured = self._validated or not trainer.enable_validation
            if measured and (one.needed == "now" or (over and one.needed == "once")):
                raise not_logged(one.owner, one.metric, names)
            if one not in self._reported:
                self._reported.add(one)
                self._report(trainer, one, names, measured)

    def _report(self, trainer: L.Trainer, one: _Monitor, names: list[str], measured: bool) -> None:
        error = not_logged(one.owner, one.metric, names, None if measured else "the training ended before a validation")
        self._found(trainer, Finding.of(error, "warning", "monitor-not-logged"))

    def _compare_ranks(self, trainer: L.Trainer) -> None:
        """Means over an epoch are those of all ranks; the value of a step, or what a rank sets itself, is its own."""
        if trainer.world_size == 1 or not self._monitored:
            return
        own = {name: trainer.callback_metrics.get(name) for name in self._monitored}
        ranks = gather_objects({name: None if value is None else float(value.mean()) for name, value in own.items()})
        for name in list(self._monitored):
            values = [one[name] for one in ranks]
            if len(set(map(repr, values))) > 1:
                self._found(trainer, _differs(self._monitored.pop(name), name, values))

    def _look_for_steps(self, trainer: L.Trainer) -> None:
        """A module may change its weights itself, `p -= lr * p.grad`, or never return a loss."""
        batches = trainer.fit_loop.epoch_loop.batch_progress.total.completed
        if trainer.global_step or not batches:
            return
        finding = Finding(
            "warning",
            "no-optimizer-step",
            f"no optimizer has stepped in the first {batches} batches",
            where=f"{type(trainer.lightning_module).__name__}.training_step",
            why="steps are counted where an optimizer of the module's parameters steps; the names of checkpoints,\n"
            "max_steps and the schedules go by them",
            fix="return the loss, or let an optimizer of self.optimizers() step; where the module accumulates over\n"
            "more than an epoch, all is well",
        )
        self._found(trainer, finding)

    def _found(self, trainer: L.Trainer, finding: Finding) -> None:
        self._session.event(finding.code, what=finding.what)
        if trainer.is_global_zero:
            self._say(str(finding))


def _differs(owners: Sequence[str], metric: str, values: Sequence[float | None]) -> Finding:
    """The finding about a metric whose value each rank decides by for itself."""
    shown = (f"rank {rank}: {'none' if value is None else f'{value:.6g}'}" for rank, value in enumerate(values))
    return Finding(
        "warning",
        "metric-differs",
        f"the metric {metric!r} of {' and '.join(owners)} differs over the ranks",
        where=", ".join(owners),
        why=f"each rank decides by its own: {listed(shown, most=4)}",
        fix=f"self.log({metric!r}, value, on_step=False, on_epoch=True) is the mean over all ranks; "
        "for the value of a step, sync_dist=True",
    )


def not_logged(owner: str, metric: str, names: list[str], reason: str | None = None) -> RunFailedError:
    """The error about a metric that `owner` monitors, with the names that are logged."""
    near = did_you_mean(metric, names)
    logged = f"logged are: {', '.join(names)}" if names else "nothing is logged"
    return RunFailedError(
        f"{owner} monitors {metric!r}, which is not logged",
        where="trainer.checkpoint.monitor" if owner == "trainer.checkpoint" else f"{owner}, monitor={metric!r}",
        why=f"{reason}; {logged}" if reason else logged,
        fix=(f"did you mean {near!r}? Else log" if near else "monitor one of these, or log")
        + f" it: self.log({metric!r}, value);\n{_LATER}",
    )


@contextmanager
def monitor_errors() -> Iterator[None]:
    """Has Lightning's reports of a metric that is not there name the one that is meant."""
    try:
        yield
    except (RuntimeError, MisconfigurationException) as error:
        text = str(error)
        for pattern, owner in _REFUSED:
            if (found := pattern.search(text)) is not None:
                rest = text[found.end() :].partition(" HINT:")[0]
                names = {match[1] for match in _NAME.finditer(rest)} - _NO_METRICS
                raise not_logged(owner, found["monitor"], sorted(names)) from error
        raise


_INTERVAL: Final = re.compile(r"_?(every_n_(?:train_)?(steps|epochs|batches))")


def endless(limit: int | None) -> float:
    """A limit of Lightning's as a number: -1 and None are none."""
    return math.inf if limit is None or limit < 0 else limit


def never_due(trainer: L.Trainer) -> Iterator[Finding]:
    """The intervals of callbacks, validations and schedules that this training is too short for.

    A callback's interval is an attribute called `every_n_steps`, `every_n_epochs` or the like.
    """
    batches = trainer.num_training_batches
    steps_of_epoch = math.inf if math.isinf(batches) else math.ceil(batches / trainer.accumulate_grad_batches)
    if not trainer.lightning_module.automatic_optimization:
        steps_of_epoch = math.inf  # the loop's own to decide
    steps = min(endless(trainer.max_steps), endless(trainer.max_epochs) * max(1, steps_of_epoch))
    epochs = min(endless(trainer.max_epochs), _epochs(steps, steps_of_epoch))
    lasts = {"steps": steps, "epochs": epochs, "batches": epochs * batches}
    for owner, name, unit, interval in _intervals(trainer):
        if interval > lasts[unit]:
            yield Finding(
                "warning",
                "interval-never-comes",
                f"{owner}({name}={interval}) never comes",
                where=owner,
                why=f"the training lasts {lasts[unit]:.0f} {unit}",
                fix=f"set {name} to {lasts[unit]:.0f} or less, or train for longer",
            )


def _epochs(steps: float, steps_of_epoch: float) -> float:
    return math.inf if math.isinf(steps) else math.ceil(steps / steps_of_epoch)


def _intervals(trainer: L.Trainer) -> Iterator[tuple[str, str, str, int]]:
    """Each interval: whose, its name, its unit, and its length."""
    for callback in vars(trainer)["callbacks"]:
        if type(callback).__module__.startswith("fairlead"):
            continue
        for name, value in vars(callback).items():
            found = _INTERVAL.fullmatch(name)
            if found is not None and isinstance(value, int) and value > 0:
                yield type(callback).__name__, found[1], found[2], value
    every, validates = trainer.check_val_every_n_epoch, trainer.enable_validation
    if validates and isinstance(every, int):
        yield "the validation", "check_val_every_n_epoch", "epochs", every
    elif validates and isinstance(trainer.val_check_batch, int):
        yield "the validation", "val_check_interval", "batches", trainer.val_check_batch
    for schedule in trainer.lr_scheduler_configs:
        unit = {"epoch": "epochs", "step": "steps"}.get(schedule.interval)
        if unit is not None:
            yield type(schedule.scheduler).__name__, "frequency", unit, int(schedule.frequency)
