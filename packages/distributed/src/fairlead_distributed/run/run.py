"""`Run`: a run directory, agreed stops and exact resume for any training loop of torch."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, Self, TypeVar
from weakref import WeakSet

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from fairlead.config import CheckpointConfig, RunConfig, TrainerConfig
from fairlead.errors import ConfigError, RunDirectoryError
from fairlead.findings import Inexact
from fairlead.plugins import PluginManager, default_plugins
from fairlead.resolution import Resolution
from fairlead.validation import validated
from fairlead_distributed.divergence import replicated_tensors
from fairlead_distributed.exact_reduction import register_exact_reduction
from fairlead_distributed.info import get_rank, get_world_size
from fairlead_distributed.loader_workers import protect_workers
from fairlead_distributed.object_fingerprint import fingerprint
from fairlead_distributed.objects import broadcast_object, gather_objects
from fairlead_distributed.ordered_loader import Replicas, loader_batch_size, unsaved_changes
from fairlead_distributed.plain_data import from_plain, put_back
from fairlead_distributed.run.checkpoints import RunCheckpoints, number
from fairlead_distributed.run.commits import CLOCK_STEPS
from fairlead_distributed.run.data import Source, replicas_here
from fairlead_distributed.run.exactness import ExactnessRecord, loop_reasons
from fairlead_distributed.run.gradients import Gradients
from fairlead_distributed.run.loading import load_weights
from fairlead_distributed.run.open_run import OpenRun, Stopped
from fairlead_distributed.run.registry import Registry, serialize
from fairlead_distributed.run.scripts import run_config
from fairlead_distributed.run.session import RunSession
from fairlead_distributed.run.silent_faults import OnDivergence, ReplicaCheck, SampleCheck
from fairlead_distributed.run.step_facts import measure_steps
from fairlead_runs.batch_size import DATA_RANKS
from fairlead_runs.guard import StopGuard

T = TypeVar("T")
Ended = Literal["step", "validation", "epoch"]
"""What has just ended where a run comes to its boundary."""

_TRAIN: Final = "train"


class Run(OpenRun):
    """A run directory, durable checkpoints, agreed stops and exact resume for a custom training loop.

    Restarted, the script resumes from the newest complete checkpoint as if it had not been interrupted: with the
    same weights, bit for bit. The loop registers all that changes while it trains, takes its batches from `batches()`,
    and calls `step()` once an optimizer step. Between two steps, where the loop asks for its next batch, the run does
    what is due: a heartbeat, a stop or a save that was requested of any rank, checks of the replicas, a checkpoint.

    All ranks use it alike; with several, the process group is there before (`fairlead_distributed.process_group`, or
    torch's own). Each rank's random generators (Python, NumPy, torch, CUDA) are in each checkpoint without being given.

    Args:
        run: The run directory, as `runs/digits`, or a `RunConfig`; None: `runs/<name of the script>`.
        config: What makes this run this run, as plain data and paths (`vars(args)`): with another value of anything in
            it the run is not continued. What may change in a job file's `trainer`, as `max_steps`, may change here.
        max_epochs: Where the training ends; None: that of `config`, if it has one.
        max_steps: The same in optimizer steps.
        checkpoint: When to save and what to keep, as a `CheckpointConfig` or its fields.
        log_every_n_steps: How often what `step` is given goes into `metrics.csv` and to the loggers; 0: never.
        loggers: Where what is logged goes besides, as in a job's `trainer`: `["prometheus"]`.
        finite: Whether a weight that is not finite fails the run, instead of being saved.
        on_divergence: What replicas that differ do: fail the run, or give a warning.
        local_buffers: Names or patterns of buffers that differ over the ranks on purpose.
        check_samples: Whether the first batches are compared over the ranks; False where data repeat on purpose.
        gather: Save a sharded model as one file with the full state, instead of a folder of shards.
        batch_policy: What stays the same when the run continues with another number of ranks; see `TrainerConfig`.
        requeue: How the job is restarted after a stop, as in a job's `trainer`; None: what fits this machine.
        guard: A `PreemptionGuard` that the script has made already.
        per_rank: Objects of which each rank has its own, by name; as `register(..., per_rank=True)`.
        copy_to: An object store to which every checkpoint is copied in the background, as `s3://bucket/runs`, or the
            settings of `checkpoint_io: remote`. A start on another machine resumes from there.
        environ: The environment variables; None: this process's.
        plugins: The plugin manager; None: the plugins installed here.
        state: What is the same on all ranks, by name: modules, optimizers, schedulers, gradient scalers, samplers,
            random generators, and anything else with `state_dict` and `load_state_dict`.

    Attributes:
        state: Plain data of the loop's own, the same on all ranks: `run.state["best"] = 0.5`. What is set before
            `restore` is what a new run begins with.
        steps: Optimizer steps that are done, over all starts.
        epoch: The epoch that the loop is in, from 0.
        finished: How the run ended, when there is nothing left to do; else None.
        accumulate_grad_batches: Batches of each rank to one optimizer step: `config["accumulate_grad_batches"]`, or 1;
            another number where the run continues with other ranks and `batch_policy="keep_global"`.

    Raises:
        ConfigError: An argument is wrong.

    Example:
        >>> with Run("runs/lm", model=model, optimizer=optimizer, max_epochs=3) as run:  # doctest: +SKIP
        ...     run.restore()
        ...     for x, y in run.batches(loader):
        ...         loss = train_step(model, optimizer, x, y)
        ...         run.step(loss=loss)
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | RunConfig | None = None,
        /,
        *,
        config: Mapping[str, Any] | None = None,
        max_epochs: int | None = None,
        max_steps: int | None = None,
        checkpoint: CheckpointConfig | Mapping[str, Any] | None = None,
        log_every_n_steps: int = 10,
        loggers: Sequence[Any] = (),
        finite: bool = True,
        on_divergence: OnDivergence = "error",
        local_buffers: Sequence[str] = (),
        check_samples: bool = True,
        gather: bool = False,
        batch_policy: Literal["keep_global", "keep_per_device"] | None = None,
        requeue: Any = None,
        guard: StopGuard | None = None,
        per_rank: Mapping[str, Any] | None = None,
        copy_to: str | Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
        plugins: PluginManager | None = None,
        **state: Any,
    ) -> None:
        plugins = plugins if plugins is not None else default_plugins()
        for name, (value, kind) in {
            "config": (config, Mapping),
            "per_rank": (per_rank, Mapping),
            "environ": (environ, Mapping),
            "finite": (finite, bool),
            "gather": (gather, bool),
        }.items():
            if value is not None and not isinstance(value, kind):
                what = f"{name} is {value!r}: it should be a {kind.__name__}"
                raise ConfigError(what, where=f"Run, {name}")
        named = (config or {}).items()
        self._config = {name: os.fspath(one) if isinstance(one, os.PathLike) else one for name, one in named}
        requested: dict[str, Any] = {
            "max_epochs": self._config.get("max_epochs") if max_epochs is None else max_epochs,
            "max_steps": self._config.get("max_steps") if max_steps is None else max_steps,
            "checkpoint": checkpoint or {},
            "log_every_n_steps": log_every_n_steps,
            "loggers": loggers,
            "on_divergence": on_divergence,
            "local_buffers": local_buffers,
            "check_samples": check_samples,
            "batch_policy": batch_policy,
            "requeue": requeue,
            "accumulate_grad_batches": self._config.get("accumulate_grad_batches"),
        }
        given = {name: value for name, value in requested.items() if value is not None}
        trainer = validated(TrainerConfig, given, "Run", plugins)
        environ = os.environ if environ is None else environ
        super().__init__(run_config(run), trainer, environ=environ, plugins=plugins, guard=guard, copy_to=copy_to)
        self.state: dict[str, Any] = {}
        self.epoch = 0
        self._max_epochs = trainer.max_epochs if trainer.max_epochs != -1 else None
        self._max_steps = trainer.max_steps if trainer.max_steps != -1 else None
        self._checkpoint = trainer.checkpoint
        if self._checkpoint.save_weights_only:
            raise ConfigError(
                "a run with save_weights_only could not be resumed",
                where="Run, checkpoint.save_weights_only",
                fix="leave it out; `fairlead checkpoint export` makes a file with the weights alone",
            )
        self._log_every = log_every_n_steps
        self._finite, self._gather = finite, gather
        self._local_buffers = tuple(trainer.local_buffers)
        self._registry = Registry()
        for name, value in state.items():
            self.register(name, value)
        for name, value in (per_rank or {}).items():
            self.register(name, value, per_rank=True)
        self._replicas = ReplicaCheck(on_divergence, _REPLICAS)
        self._samples = SampleCheck(print, _SAMPLES) if check_samples else None
        self._saves: RunCheckpoints | None = None
        self._restored = self._in_epochs = False
        self._left_within = False  # `max_steps` ended the loop within this epoch, and its body is over
        self._given: list[str] = []  # the keys of `state` that the script sets before `restore`
        self._gradients: Gradients | None = None
        self._saved_contents: object = None
        self._sources: dict[str, Source] = {}
        self._unread: dict[str, Source] = {}  # those of the checkpoint that this start has not read yet
        self._same_ranks = True
        self._data: Replicas | None = None
        self._seed = 0
        self._just_ended: set[Ended] = set()
        self._save_requested = False  # for a checkpoint, by `save`
        self._stepped = self._just_stepped = False
        self._loop_source: Source | None = None  # the first that gave a batch since the last boundary: it has the loop
        self._seen: list[Inexact] = []
        self._exactness: ExactnessRecord | None = None
        self._phase = _TRAIN
        self._latest_metrics: dict[str, Any] = {}
        self._compared = False
        self._batches = 0
        self._saved_at = 0.0
        self._hooks: list[RemovableHandle] = []
        self._steppers: WeakSet[Optimizer] = WeakSet()  # the optimizers that have been looked at

    # -- opening and closing

    def __enter__(self) -> Self:
        data = replicas_here(self._registry.layout(), self._registry)
        counts = {DATA_RANKS: data.count if data is not None else None}
        self._open(self._settings(), self._registry.modules(), "Run", **counts)
        return self

    def _prepare(self, session: RunSession, resolution: Resolution) -> None:
        self._saves = RunCheckpoints(
            session, self._registry, self._checkpoint, self.copies, finite=self._finite, gather=self._gather
        )
        self._replicas.begin(session)
        if session.proof is not None:
            self._log_every = 1  # so that the first step shows that differs

    def _settings(self) -> dict[str, Any]:
        limits = {"max_epochs": self._max_epochs, "max_steps": self._max_steps}
        return {**self._config, **{name: limit for name, limit in limits.items() if limit is not None}}

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if self.finished is None and error is None and self._restored:
                try:
                    self.finish()
                except BaseException as raised:
                    error = raised
                    raise
        finally:
            while self._hooks:
                self._hooks.pop().remove()
            self._close(error)

    def _finish_writes(self) -> None:
        if self._saves is not None:
            self._saves.finish_writes(self.steps)

    def register(self, name: str, value: Any, *, per_rank: bool = False) -> None:
        """Adds an object to what is saved and restored; before `restore`.

        Args:
            name: How it is called in the checkpoint.
            value: Anything with `state_dict` and `load_state_dict`, or a random generator.
            per_rank: Each rank has its own, such as a stage of a pipeline or a loader with a state.

        Raises:
            ConfigError: It has no state, the name is taken, or the run is restored already.

        Example:
            >>> run.register("ema", ema)  # doctest: +SKIP
        """
        if getattr(self, "_restored", False):
            raise ConfigError(
                f"{name} is registered after restore()", where="Run.register()", fix="register it before run.restore()"
            )
        self._registry.add(name, value, per_rank=per_rank)

    def restore(self) -> bool:
        """Loads the newest complete checkpoint of the run; the random generators come last.

        Call it once, when everything is set up and seeded, and draw nothing between it and the loop. A finished run
        gives its last state as well: its loop finds nothing left to do.

        Returns:
            Whether there was a checkpoint. Without one nothing is changed.

        Raises:
            CheckpointError: The checkpoint is damaged, or does not fit; some objects may have been loaded already.
        """
        session = self._opened()
        if self._restored:
            raise ConfigError("the run was restored already", where="Run.restore()", fix="call it once")
        session.beat("restore", 0)
        for one in self._registry:
            if isinstance(one.value, DistributedDataParallel):
                register_exact_reduction(one.value, auto=True)
        if session.weights is not None:
            for name, module in self._registry.modules().items():
                load_weights(module, session.weights, name)
        saves = self._saves or RunCheckpoints(
            session, self._registry, self._checkpoint, None, finite=True, gather=False
        )
        saves.layout = self._registry.layout()
        self._registry.watch()
        self._given = list(self.state)
        self._seed = int(broadcast_object(torch.initial_seed()))
        self._data = replicas_here(saves.layout, self._registry)
        file = session.checkpoint
        own = file is not None and file.is_relative_to(session.path)
        positions: Mapping[str, Any] = {}
        mine: Mapping[str, Any] = {}
        if file is not None:
            metadata, shared, mine, self._same_ranks = saves.load(file)
            self.steps, self.epoch, self._seed = int(metadata["step"]), int(metadata["epoch"]), int(shared["seed"])
            self._restore_state(shared)
            self._left_within = bool(shared.get("left_within"))
            for name, saved in mine["loaders"].items():
                self._unread[name] = Source(name, saved, self._registry.attributes, same_ranks=self._same_ranks)
            saves.monitor = saves.monitor or metadata.get("monitor")  # or the best so far would be deleted
            saves.saved = self._position() if own else None
            self._saved_contents = self._contents()
            positions = shared if own else {}
        if self.steps:
            for optimizer in self._registry.optimizers().values():
                vars(optimizer)["_opt_called"] = True  # or torch warns of a scheduler that steps first in this start
        self._registry.attributes.begun()
        self._restored = True
        if self.finished is None:
            self._gradients = Gradients(self._registry.modules(), self._registry.optimizers())
            self._hooks += [*self._gradients.watch(), register_optimizer_step_pre_hook(self._steps_with)]
            self._restore_gradients(mine.get("gradients", {}))
            self._log_from(self.steps if own else None, positions, self._settings())
            self._measure(session)
            session.begin(step=self.steps, epoch=self.epoch)
        self._saved_at = time.monotonic()
        self._record_reasons()
        if file is not None:
            rank = self._data.rank if self._data is not None else get_rank()
            saves.restore_generators(mine, self.steps, rank, same_ranks=self._same_ranks)
        session.beat("first-batch", self.steps)
        return file is not None

    def _restore_state(self, shared: Mapping[str, Any]) -> None:
        """Into the objects that the script has put there; a key that it has deleted since does not come back."""
        here = {key: value for key, value in self.state.items() if key not in shared.get("deleted", ())}
        put_back(self.state, {**here, **from_plain(shared["state"])})

    def _restore_gradients(self, saved: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        assert self._gradients is not None
        if self._same_ranks:
            self._gradients.restore(saved)
        elif any(saved.values()):
            self._add_reason(_GRADIENTS)

    def _measure(self, session: RunSession) -> None:
        """Has the session know what a step's time goes into."""
        measure_steps(
            session,
            lambda: (one.value for one in self._registry),
            lambda: next((one.loader for one in self._sources.values()), None),
            self.say,
        )
        times = session.times
        if times is None:
            return
        at = times.at

        def begins(*_: Any) -> None:
            at("optimizer")

        def is_over(*_: Any) -> None:
            at("compute")

        for optimizer in self._registry.optimizers().values():
            self._hooks += [optimizer.register_step_pre_hook(begins), optimizer.register_step_post_hook(is_over)]

    # -- in the loop

    def epochs(self, most: int | None = None) -> Iterator[int]:
        """The epochs that are left, from the one in which the run was interrupted; `batches` then ends with each.

        Args:
            most: The number of epochs of the training in all starts; None: `max_epochs`.

        Example:
            >>> for epoch in run.epochs(10):  # doctest: +SKIP
            ...     for x, y in run.batches(loader):
            ...         run.step(loss=train_step(x, y))
            ...     scheduler.step()
        """
        most = self._max_epochs if most is None else _count("epochs", most)
        if most is None and self._max_steps is None:
            raise ConfigError(
                "there is no last epoch", where="Run.epochs()", fix="run.epochs(10), or Run(max_epochs=10)"
            )
        self._in_epochs = True
        # Stopped at the last step: what follows the batches in the body of that epoch is not done yet.
        unfinished = (
            self._steps_done() and not self._left_within and any(one.batches or one.over for one in self._all_sources())
        )
        try:
            while self.finished is None and (most is None or self.epoch < most):
                if self._steps_done() and not unfinished:
                    return
                unfinished = self._left_within = False
                yield self.epoch
                if self._steps_done() and not all(one.over for one in self._sources.values()):
                    self._left_within = True
                    return  # within an epoch: more steps continue in it
                self._end_epoch()
                self._at_boundary()
        finally:
            self._in_epochs = False

    def batches(self, loader: Iterable[T], *, name: str = "train") -> Iterator[T]:
        """The loader's batches from where the run was interrupted; each counts as trained on.

        Within `epochs`, to the end of the epoch. Otherwise over the epochs, to `max_epochs` or `max_steps`, or without
        end. It takes nothing from the random generators. A `DataLoader` over a map-style dataset is divided over the
        ranks and resumes exactly, also with another number of ranks; its order is made of the seed and the epoch. One
        with a `state_dict` (torchdata, Hugging Face) is trusted. Another one begins its epoch anew, with a
        warning.

        Args:
            loader: The loader, as it is made in each start.
            name: Tells several loaders of one loop apart.

        Raises:
            ConfigError: The run is not restored yet, or which ranks share batches is not known.
        """
        if self.finished is not None:
            return
        self._require_training("batches()")
        source = self._source(name, loader)
        if source.passed:
            raise ConfigError(
                f"the loader {name!r} has given all its batches already",
                where="Run.batches()",
                why="to the end of this epoch" if self._in_epochs else "it goes over all epochs by itself",
                fix="evaluate with the loader itself: `for x, y in held_out`; give another loader that is trained on "
                'another name: run.batches(other, name="other")'
                if self._in_epochs
                else "for a loop with epochs, `for epoch in run.epochs(10)` around `for batch in run.batches(loader)`",
            )
        yield from self._rest_of(source)
        source.passed = True

    def _rest_of(self, source: Source) -> Iterator[Any]:
        if source.over and not self._in_epochs:  # saved by a loop over `epochs`
            self._end_epoch(source)
        while not source.over and not self._ends(source):
            if not self._in_epochs and self._max_epochs is not None and source.epoch >= self._max_epochs:
                return
            yield from self._epoch_of(source)
            if self._in_epochs or not source.over:
                return
            self._end_epoch(source)
            if self._leads(source):
                self._at_boundary()

    def step(self, **metrics: Any) -> None:
        """Counts an optimizer step, once for each, at the end of what belongs to it.

        Args:
            metrics: Numbers of this step, or tensors with one element, of which every `log_every_n_steps`-th goes into
                `metrics.csv`: `run.step(loss=loss)`.

        Raises:
            Stopped: All ranks have agreed to stop, and everything is saved. In a loop over `batches` it is raised
                where that asks for its next batch, when what else the loop does in this step is done.
        """
        session = self._require_training("step()")
        self.steps += 1
        self._latest_metrics = {}
        self._stepped = self._just_stepped = True
        self._just_ended.add("step")
        if self._in_epochs and not self._sources:
            self._add_reason(_NO_BATCHES)
        session.at("logging" if self._sources else "compute")
        session.beat(_TRAIN, self.steps)
        if metrics and self._log_every and self.steps % self._log_every == 0:
            self.log(metrics)
        if not self._sources:  # no batch is requested from this run
            self._at_boundary()

    def due(self, *, every: int) -> bool:
        """Whether a multiple of so many steps was just done, as for a validation."""
        every = _count("due", every, least=1)
        if not self._sources and self._just_stepped:
            self._add_reason(_BEHIND_STEP)
        return self._just_stepped and self.steps % every == 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What the loop is at, as `fairlead status` shows it: `with run.phase("validate"): ...`.

        What is logged in a phase `validate` counts as measured of this step: a checkpoint follows it, with
        `CheckpointConfig(on_validation=True)`, when the step is over.
        """
        if self.finished is not None:
            yield
            return
        session = self._require_training("phase()")
        before, self._phase = self._phase, name
        session.beat(name, self.steps)
        try:
            yield
        finally:  # if what was raised is not caught, the heartbeat keeps the phase that failed
            self._phase = before
        session.beat(before, self.steps)
        if name == "validate":
            self._just_ended.add("validation")

    def log(self, metrics: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Adds numbers of this step, or tensors with one element, to rank 0's `metrics.csv`; not of a finished run.

        Raises:
            ConfigError: A value is not one number.
        """
        if self.finished is not None:
            return
        self._require_training("log()")
        found = {**(metrics or {}), **more}
        for name, value in found.items():
            number(name, value)  # on all ranks, and before it is in the file
        self._latest_metrics.update(found)
        self._write_metrics(self.steps, {"epoch": self.epoch, **found})

    def save(self) -> None:
        """Asks for a checkpoint of this step, on all ranks alike; it is written when the step is over.

        Of a finished run nothing is saved.
        """
        if self.finished is not None:
            return
        self._require_training("save()")
        self._save_requested = True
        if not self._sources:
            assert self._saves is not None
            self._saves.saved = None  # `state` may hold more than when `step` has saved
            self._at_boundary()

    def finish(self, **metrics: Any) -> None:
        """Saves the result, as it is now, and records the run's end; a `with` block that ends by itself does so too.

        Args:
            metrics: What was measured of the result.

        Raises:
            CheckpointError: The result could not be saved, on all ranks; the run is not finished then.
        """
        if self.finished is not None:
            return
        session = self._require_training("finish()")
        saves = self._saves
        assert saves is not None
        if metrics:
            self.log(metrics)
        if any(gather_objects(bool(metrics) or self._contents() != self._saved_contents)):
            saves.saved = None  # what the loop has changed after the last step is in the result
        if self._stepped:
            self._compare()
        position = self._position()
        saves.save_for_sure(self.steps, self._save, position=position)
        saves.copied()
        self.close_metrics()
        session.complete(step=self.steps, epoch=self.epoch)
        self.finished = f"step {self.steps}"
        self.say(f"{session.path} is finished: {self.finished}")

    @property
    def path(self) -> Any:
        """The run directory, a `pathlib.Path`."""
        return self._opened().path

    # -- the boundary

    def _at_boundary(self) -> None:
        """Between two steps: does what is due, in this order: stop, checks, checkpoint."""
        ended, self._just_ended = self._just_ended, set()
        requested, self._save_requested = self._save_requested, False
        if not ended and not requested:
            return
        session, boundary, gradients = self._opened(), self._boundary, self._gradients
        assert boundary is not None
        assert gradients is not None
        self._loop_source = None
        gradients.boundary((self.steps, self._batches))
        agreed = boundary.agreed()
        if agreed == "stop":
            self._stop()
        requested |= agreed == "save"
        if not self._compared and self._stepped:
            self._compare()
        if requested or self._save_due(ended):
            self._save()
        session.beat(self._phase, self.steps)

    def _save_due(self, ended: set[Ended]) -> bool:
        config = self._checkpoint
        steps, epochs = config.every_n_steps, config.every_n_epochs
        due = "step" in ended and steps is not None and self.steps % steps == 0
        due |= "epoch" in ended and epochs is not None and self.epoch % epochs == 0
        due |= "validation" in ended and config.on_validation
        if config.every_n_minutes is not None and not due:  # the clocks of the ranks differ
            late = time.monotonic() - self._saved_at >= 60 * config.every_n_minutes
            looks = get_world_size() == 1 or self.steps % CLOCK_STEPS == 0
            due = looks and bool(broadcast_object(late))
        return due

    def _save(self) -> bool:
        session, saves = self._opened(), self._saves
        assert saves is not None
        if saves.saved == self._position():
            return True
        session.beat("save", self.steps)
        self._compare()
        assert self._gradients is not None
        self._gradients.boundary((self.steps, self._batches))
        # Flushes metrics.csv as well, so that no checkpoint is ahead of it.
        shared = {
            "seed": self._seed,
            "state": serialize(self.state, "run.state"),
            "deleted": [key for key in self._given if key not in self.state],
            "left_within": self._left_within,
            **self._log_positions(),
        }
        own = {"loaders": {one.name: one.state() for one in self._all_sources()}, "gradients": self._gradients.state()}
        replicas = self._replicas_of_data()
        count = replicas.count if replicas is not None else get_world_size()
        metadata = {
            "epoch": self.epoch,
            "world_size": get_world_size(),
            "replicas": [count, max(1, get_world_size() // count)],
            "accumulate_grad_batches": self.accumulate_grad_batches,
        }
        metrics = {name: number(name, value) for name, value in self._latest_metrics.items()}
        saved = saves.save(self.steps, own, shared, metrics, metadata, position=self._position())
        self._saved_at, self._saved_contents = time.monotonic(), self._contents()
        self._record_reasons()
        session.beat(self._phase, self.steps)
        return saved

    def _stop(self) -> None:
        saves, ending = self._saves, self._ending
        assert saves is not None
        assert ending is not None
        ending.agreed()
        failure: Exception | None = None
        try:
            saves.save_for_sure(self.steps, self._save, position=self._position())
        except Exception as error:
            failure = error
        raise Stopped(ending.carry_out(failure))

    def _compare(self) -> None:
        """Whether the replicas still hold the same."""
        self._compared = True
        saves = self._saves
        if saves is None or saves.layout == "stages" or get_world_size() == 1:
            return
        pairs = replicated_tensors(
            self._registry.model(),
            self._registry.shared_optimizers().values(),
            buffers=self._data is not None and not self._registry.is_ddp(),  # slices of a layer may have their own
            local_buffers=self._local_buffers,
        )
        self._replicas.compare(self.steps, pairs)

    def _steps_with(self, optimizer: Optimizer, *_: Any) -> None:
        """Before each step of any optimizer: one that the script has not registered is named."""
        if optimizer in self._steppers:
            return
        self._steppers.add(optimizer)
        saved = self._registry.saved_optimizers()
        weights = {id(one) for module in self._registry.modules().values() for one in module.parameters()}
        changed = (one for group in optimizer.param_groups for one in group["params"] if id(one) in weights)
        if saved and optimizer not in saved and next(changed, None) is not None:
            self._add_reason(
                Inexact(
                    f"an optimizer that is not registered ({type(optimizer).__name__})",
                    why="it changes weights of the run, and what it keeps of earlier steps is in no checkpoint",
                    fix="make it before restore(), and register it: Run(..., optimizer=optimizer)",
                    certain=False,
                )
            )

    # -- epochs and loaders

    def _source(self, name: str, loader: Any) -> Source:
        source = self._sources.get(name)
        if source is None:
            source = self._unread.pop(name, None)
            if source is None:
                source = Source(name, None, self._registry.attributes, same_ranks=self._same_ranks)
                source.epoch = self.epoch
            self._sources[name] = source
        if source.running:
            raise ConfigError(
                f"two loaders are read under the name {name!r}",
                where="Run.batches()",
                fix='give one another name: run.batches(loader, name="other")',
            )
        source.prepare(loader, self._seed, self._data, in_epochs=self._in_epochs)
        if not self._batches:
            self._opened().beat("first-batch", self.steps)
            size = loader_batch_size(loader)
            replicas = self._replicas_of_data()
            if size is not None and replicas is not None:
                self._opened().batch_is(size * replicas.count * self.accumulate_grad_batches)
        if self._guard is not None:
            protect_workers(source.loader, self._guard.in_worker)
        if self._samples is not None and not self._batches:
            self._samples.begin(self._session, int(getattr(loader, "num_workers", 0)))
        self._record_reasons()
        return source

    def _epoch_of(self, source: Source) -> Iterator[Any]:
        session = self._opened()
        session.at("data")
        iterator, epoch = source.begin(self._seed, self.steps), source.epoch
        try:
            while source.at_end or not self._ends(source):
                session.at("data")
                batch = next(iterator, _END)
                session.at("compute")
                if batch is _END:
                    source.ended()
                    if self._in_epochs and self._leads(source):
                        self._at_boundary()
                    return
                source.took()
                self._loop_source = source if self._leads(source) else self._loop_source
                self._just_stepped = False
                self._batches += 1
                if self._samples is not None and self._samples.saw(batch):
                    self._compare_samples()
                yield batch
                if source.epoch != epoch:
                    raise ConfigError(
                        f"the batches of {source.name!r} are taken beyond the epoch in which they began",
                        where="Run.batches()",
                        why="within run.epochs() they end with each epoch, and are others in the next",
                        fix=f"call run.batches(..., name={source.name!r}) in each epoch",
                    )
                if self._just_ended and not source.at_end and self._leads(source):
                    self._at_boundary()
        finally:
            source.running = False

    def _ends(self, source: Source) -> bool:
        """Whether `max_steps` ends it: not within the loop's body, which may need more of another loader."""
        return self._steps_done() and self._leads(source)

    def _leads(self, source: Source) -> bool:
        """Whether the loop's body is over when this source is read: another one may be read within the body."""
        return self._loop_source is None or self._loop_source is source or not self._loop_source.running

    def _compare_samples(self) -> None:
        replicas = self._replicas_of_data()
        if self._samples is not None and replicas is not None:
            self._samples.compare(replicas.rank, [one.loader for one in self._sources.values()])

    def _replicas_of_data(self) -> Replicas | None:
        """Which ranks take different batches, as a sampler says it or the model's layout; None: it is not known."""
        return next((one.replicas for one in self._sources.values() if one.replicas is not None), self._data)

    def _end_epoch(self, only: Source | None = None) -> None:
        self._compare_samples()
        for source in [only] if only is not None else self._all_sources():
            source.next_epoch()
        # Without `epochs` those of the loader `train` are the run's; where none is called so, of the one that leads.
        train = self._sources.get(_TRAIN, self._unread.get(_TRAIN))
        if only is None or only is train or (train is None and self._leads(only)):
            self.epoch += 1
            self._just_ended.add("epoch")
            if self.epoch == 1 and not self.steps:
                self.say(
                    "warning: an epoch is over, and run.step() was not called: stops and checkpoints within an epoch "
                    "wait for it, and max_steps counts its calls; call it after each optimizer step"
                )

    def _steps_done(self) -> bool:
        return self._max_steps is not None and self.steps >= self._max_steps

    def _position(self) -> object:
        """Where the training is: what a checkpoint is worth saving for."""
        over = any(one.over for one in self._all_sources())
        return self.steps, self.epoch, self._batches, over, self._left_within

    def _all_sources(self) -> list[Source]:
        return [*self._sources.values(), *self._unread.values()]

    def _contents(self) -> object:
        """Changes with the weights and `state`, on this rank."""
        tensors = [*self._registry.model().parameters(), *self._registry.model().buffers()]
        versions = [(id(one), None if one.is_inference() else one._version) for one in tensors]
        return versions, fingerprint(self.state, {})

    def progress(self) -> object:
        """Changes with each batch and step."""
        return self.steps, self._batches, self._phase

    # -- what is reported

    def _add_reason(self, reason: Inexact) -> None:
        if reason not in self._seen:
            self._seen.append(reason)
            self._record_reasons()

    def _record_reasons(self) -> None:
        session = self._opened()
        if get_rank() or self.finished is not None:
            return
        seen = [reason for one in self._sources.values() for reason in one.reasons()]
        unsaved = [reason for one in self._sources.values() for reason in unsaved_changes(one.loader)]
        self._seen += [reason for reason in dict.fromkeys(unsaved) if reason not in self._seen]
        if self._exactness is None:
            start = session.path / "starts" / str(session.start)
            self._exactness = ExactnessRecord(start, session.job_digest, self.say)
        reasons = [*loop_reasons(self._registry, self._seed), *seen, *self._seen]
        self._exactness.update([], reasons, get_world_size())

    def _require_training(self, call: str) -> RunSession:
        session = self._opened()
        if self.finished is not None:
            raise RunDirectoryError(
                "the run is finished, nothing more is written into it",
                where=str(session.path),
                why=f"Run.{call} after the end: {self.finished}",
                fix="to train for longer, raise `max_steps` or `max_epochs`; "
                "for a new run beside it, RunConfig(name=..., resume='never')",
            )
        if not self._restored:
            raise ConfigError(
                f"Run.{call} before restore()",
                where=str(session.path),
                why="the run may have a checkpoint, and would be overwritten by one that knows nothing of it",
                fix="call run.restore() before the loop; it does nothing in a new run",
            )
        return session


def _count(call: str, given: object, *, least: int = 0) -> int:
    """What a method was given, if it is such a number."""
    if isinstance(given, bool) or not isinstance(given, int) or given < least:
        raise ConfigError(f"{given!r} is not an integer of at least {least}", where=f"Run.{call}()")
    return given


_END: Final = object()
_NO_BATCHES: Final = Inexact(
    "the position in an epoch",
    why="the loop in run.epochs() takes no batch from run.batches(): a resume begins the epoch anew",
    fix="for x, y in run.batches(loader)",
)
_BEHIND_STEP: Final = Inexact(
    "what the loop does after run.step()",
    why="the loop takes no batch from run.batches(): a stop ends the run within step(), and a checkpoint of that step "
    "is resumed behind it",
    fix="for batch in run.batches(loader); or do it before run.step(), where (run.steps + 1) % 500 == 0",
    certain=False,
)
_GRADIENTS: Final = Inexact(
    "gradients that no optimizer had used yet",
    why="they are of each rank, and another number of ranks continues without them",
    fix="resume with as many ranks, or from a checkpoint after a step of the optimizer",
)
_REPLICAS: Final = (
    "A buffer that differs on purpose: Run(local_buffers=[its name]). Modules that differ by rank:\n"
    "Run(per_rank={...}). Replicas that differ on purpose: Run(on_divergence='warning')"
)
_SAMPLES: Final = (
    "an IterableDataset has to skip what others read: by torch.utils.data.get_worker_info() and\n"
    "torch.distributed.get_rank(), or datasets.distributed.split_dataset_by_node(dataset, rank, world_size).\n"
    "Data that repeat on purpose: Run(check_samples=False)"
)
