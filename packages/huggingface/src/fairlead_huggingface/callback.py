"""`Fairlead`: one callback that gives Hugging Face's Trainer a run directory, agreed stops and resume."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from fairlead.config import CheckpointConfig, RunConfig, TrainerConfig
from fairlead.errors import CheckpointError, ConfigError
from fairlead.plugins import PluginManager, default_plugins
from fairlead.resolution import Resolution
from fairlead.validation import validated
from fairlead_distributed.info import get_rank, get_world_size
from fairlead_distributed.objects import gather_objects
from fairlead_distributed.run.checkpoints import GroupRanks
from fairlead_distributed.run.commits import (
    Commit,
    Commits,
    Problem,
    explained,
    load_part,
    raised_by,
    rank_file,
    write_errors,
)
from fairlead_distributed.run.memory import Owner, is_a_librarys
from fairlead_distributed.run.open_run import OpenRun, Stopped
from fairlead_distributed.run.proof import owners_of
from fairlead_distributed.run.scripts import run_config
from fairlead_distributed.run.session import RunSession
from fairlead_distributed.run.step_facts import measure_steps
from fairlead_huggingface import compat
from fairlead_runs.checkpoint_io import CheckpointCopies
from fairlead_runs.commit import RetentionPolicy
from fairlead_runs.guard import StopGuard

_IDENTITY: Final = (
    *("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "optim"),
    *("lr_scheduler_type", "warmup_steps", "label_smoothing_factor", "seed", "data_seed", "bf16", "fp16"),
    "per_device_train_batch_size",
)
"""The training arguments that identify a run: with another value of one of them it is not continued. Of
`gradient_accumulation_steps` and the number of ranks, `batch_policy` decides."""
_TRAINER_STATE: Final = "trainer_state.json"


class Fairlead(TrainerCallback):
    """A run directory, agreed stops and resume for Hugging Face's Trainer.

    `trainer.train()` then opens the run and resumes from its newest complete checkpoint. On a signal to any rank all
    save at the same step, the job is requeued, and `fairlead.Stopped` ends the process with the right exit code. The
    Trainer writes its own checkpoints, when its arguments say so; each is committed as one into the run directory, with
    `save_total_limit` and the best by `metric_for_best_model` retained. A last one is always written.

    Args:
        run: The run directory, as `runs/x`, or a `RunConfig`; None: `runs/<name of the script>`.
        requeue: Who restarts the job after a stop, as in a job's `trainer`; None: what fits this machine.
        loggers: Where what is logged goes besides, as in a job's `trainer`: `["prometheus"]`.
        guard: A `PreemptionGuard` that the script has made already, as before long preparations.
        copy_to: An object store to which every checkpoint is copied in the background, as `s3://bucket/runs`, or the
            settings of `checkpoint_io: remote`.
        batch_policy: What stays the same when the run resumes with another number of ranks: the global batch
            (`gradient_accumulation_steps` is set to what keeps it) or the batch of each device; see `TrainerConfig`.
        environ: The environment variables; None: this process's.
        plugins: The plugin manager; None: the plugins installed here.

    Raises:
        ConfigError: An argument is wrong; or it was added to a Trainer that exists already.

    Example:
        >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[Fairlead("runs/x")])  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | RunConfig | None = None,
        *,
        requeue: Any = None,
        loggers: Sequence[Any] = (),
        guard: StopGuard | None = None,
        copy_to: str | Mapping[str, Any] | None = None,
        batch_policy: Literal["keep_global", "keep_per_device"] | None = None,
        environ: Mapping[str, str] | None = None,
        plugins: PluginManager | None = None,
    ) -> None:
        self._run = run_config(run)
        self._plugins = plugins if plugins is not None else default_plugins()
        self._environ = os.environ if environ is None else environ
        requested: dict[str, Any] = {"loggers": loggers, "batch_policy": batch_policy}
        requested |= {"requeue": requeue} if requeue is not None else {}
        self._config = validated(TrainerConfig, requested, "Fairlead", self._plugins)
        self._guard = guard
        self._copy_to = copy_to
        self._of: _TrainerRun | None = None

    @property
    def path(self) -> Path:
        """The run directory, while `train` runs."""
        return self._training()._opened().path

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The Trainer is made: from here on its `train` is a fit of the run."""
        trainer = compat.maker(args)
        if sum(isinstance(one, Fairlead) for one in trainer.callback_handler.callbacks) > 1:
            raise ConfigError(
                "a Trainer has one run: two Fairlead callbacks were given", where="Trainer(callbacks=...)"
            )
        train = trainer.train

        def in_a_run(resume_from_checkpoint: Any = None, *more: Any, **named: Any) -> Any:
            if isinstance(resume_from_checkpoint, str):
                raise ConfigError(
                    "the run resumes by itself from its newest complete checkpoint",
                    where=f"trainer.train({resume_from_checkpoint!r})",
                    fix="leave it out; to begin a new run from that checkpoint: "
                    f"Fairlead(RunConfig(name=..., resume={resume_from_checkpoint!r}))",
                )
            if named.get("trial") is not None:
                raise ConfigError(
                    "the trials of a hyperparameter search would all be one run",
                    where="trainer.hyperparameter_search()",
                    fix="search without this callback; or start each trial with a run of its own",
                )
            run = self._of = _TrainerRun(
                trainer,
                self._run,
                self._config,
                environ=self._environ,
                plugins=self._plugins,
                guard=self._guard,
                copy_to=self._copy_to,
            )
            return run.train(train, *more, **named)

        trainer.train = in_a_run

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Everything is restored."""
        self._training().begin(state)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """A step begins, behind whatever there was; its batches are there."""
        self._training().at("train")
        self._training().part("compute")

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The gradients are clipped."""
        self._training().part("optimizer")

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The optimizer has stepped."""
        self._training().part("logging")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The boundary: a stop or a save, if any rank has requested one."""
        self._training().boundary(state, control)
        self._training().part("data")

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The epoch is over; what the Trainer evaluates and saves now is of all of it."""
        self._training().epoch_over = True

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """A batch of an evaluation is done."""
        if self._of is not None:
            self._of.at("validate")

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        """Adds what is logged to `metrics.csv`; the next batch comes then."""
        if self._of is not None:
            self._of.log(state, logs or {})
            self._of.part("data")

    def _training(self) -> _TrainerRun:
        if self._of is None:
            raise ConfigError(
                "the callback was added to a Trainer that exists already",
                where="trainer.add_callback(Fairlead(...))",
                why="it has to be there before `train` is called, to open the run and to find its checkpoint",
                fix="Trainer(..., callbacks=[Fairlead(...)])",
            )
        return self._of


class _TrainerRun(OpenRun):
    """One call of `trainer.train`."""

    def __init__(
        self,
        trainer: Trainer,
        run: RunConfig,
        config: TrainerConfig,
        *,
        environ: Mapping[str, str],
        plugins: PluginManager,
        guard: StopGuard | None,
        copy_to: str | Mapping[str, Any] | None,
    ) -> None:
        config = config.model_copy(update={"accumulate_grad_batches": trainer.args.gradient_accumulation_steps})
        super().__init__(run, config, environ=environ, plugins=plugins, guard=guard, copy_to=copy_to)
        self.epoch_over = True
        self.current = compat.Pass(0, 0)
        self.resumed: compat.Pass | None = None
        self.over = False
        self._hf = trainer
        self._saves: _TrainerCheckpoints | None = None
        self._agreed: Literal["stop", "save"] | None = None
        self._deferred = False
        self._last_of_epoch = False
        self._stopping = False
        self._evaluated = 0
        self._phase = ""
        self._measured: dict[str, float] = {}

    def train(self, train: Any, *more: Any, **named: Any) -> Any:
        """Trains in the run; `train` is the Trainer's own method."""
        args = self._hf.args
        if args.save_only_model:
            raise ConfigError(
                "a run with save_only_model could not be resumed",
                where="TrainingArguments(save_only_model=True)",
                why="its checkpoints have no optimizer, schedule and random generators",
                fix="leave it out, and limit the disk by save_total_limit; trainer.save_model() writes weights alone",
            )
        limits = {"max_epochs": args.num_train_epochs} if args.max_steps <= 0 else {"max_steps": args.max_steps}
        settings = {name: _plain(getattr(args, name)) for name in _IDENTITY if hasattr(args, name)}
        model: Any = self._hf.model
        try:
            self._open({**settings, **limits}, {"model": model} if model is not None else {}, "Trainer")
            session = self._opened()
            resume = str(session.checkpoint) if session.checkpoint is not None else None
            self._require_same_data(session)
            self._accumulate()
            with compat.in_a_run(self._hf, self):
                result = train(resume, *more, **named)
            self._finish()
        except BaseException as error:
            if self._session is not None:
                self._close(error)
            raise
        self._close(None)
        return result

    def _require_same_data(self, session: RunSession) -> None:
        """The Trainer finds epoch and batch by counting steps: with other data it would continue elsewhere."""
        file, now = session.checkpoint, compat.samples(self._hf)
        if file is None or self._saves is None or not file.is_relative_to(session.path):
            return
        saved = self._saves.part(file, 0).get("samples", now)
        if saved != now:
            raise CheckpointError(
                f"train_dataset had {_number(saved)} samples, now {_number(now)}",
                where=str(file),
                why="the Trainer counts epochs in steps, and would continue at the wrong sample",
                fix="resume with the same data; or begin a new run with these weights",
            )

    def _accumulate(self) -> None:
        """Has the Trainer accumulate what `batch_policy` asks for."""
        args, steps = self._hf.args, self.accumulate_grad_batches
        if self.finished is not None or steps == args.gradient_accumulation_steps:
            return
        if self._hf.is_deepspeed_enabled:
            raise ConfigError(
                f"the global batch is kept with gradient_accumulation_steps={steps}, which DeepSpeed has to be given",
                where="Fairlead(batch_policy=...)",
                why="its configuration was made with the Trainer",
                fix=f"TrainingArguments(gradient_accumulation_steps={steps}, ...)",
            )
        args.gradient_accumulation_steps = steps
        self.say(f"gradient_accumulation_steps is {steps} now, which keeps the global batch with these ranks")

    def _prepare(self, session: RunSession, resolution: Resolution) -> None:
        args = self._hf.args
        measured = args.metric_for_best_model
        monitor = None if measured is None else measured if measured.startswith("eval_") else f"eval_{measured}"
        config = CheckpointConfig(
            keep_last=args.save_total_limit or 1,
            keep_best=1 if monitor is not None else 0,
            monitor=monitor,
            mode="max" if args.greater_is_better else "min",
        )
        self._saves = _TrainerCheckpoints(session, self._hf, config, self.copies)
        self._saves.keep_all = args.save_total_limit is None
        if session.proof is not None:
            args.logging_strategy, args.logging_steps = IntervalStrategy.STEPS, 1  # to see the first step that differs
            session.proof.watch(self._owners)

    def _owners(self) -> list[Owner]:
        callbacks = [one for one in self._hf.callback_handler.callbacks if not isinstance(one, Fairlead)]
        own = [Owner(one, f"callback {type(one).__name__}") for one in callbacks if not is_a_librarys(type(one))]
        model: Any = self._hf.model
        return [*owners_of({type(model).__name__: model}), *own]

    def begin(self, state: TrainerState) -> None:
        """Everything is restored; of a finished run nothing is left to do."""
        session = self._opened()
        self.steps = state.global_step
        if self.finished is not None:
            return
        own = session.checkpoint is not None and session.checkpoint.is_relative_to(session.path)
        assert self._saves is not None
        if own:
            self._saves.saved = self.steps
            assert session.checkpoint is not None
            first = self._saves.part(session.checkpoint, 0)
            self._log_from(self.steps, first, {})
            self.resumed = compat.Pass(*first.get("pass", (0, 0)))
            self.over = first.get("ended") == state.max_steps
            compat.restore_loss(self._hf, self._saves.part(session.checkpoint, get_rank()))
        else:
            self._log_from(None, {}, {})
        if session.checkpoint is not None:
            compat.restore_callbacks(self._hf, state, own=own)
        session.begin(step=self.steps, epoch=int(state.epoch or 0))
        args = self._hf.args
        session.batch_is(args.train_batch_size * args.gradient_accumulation_steps * get_world_size())
        measure_steps(
            session,
            lambda: (self._hf.model_wrapped,),
            lambda: self._hf.callback_handler.train_dataloader,
            self.say,
        )
        self.at("first-batch")

    def at(self, phase: str) -> None:
        """What this rank is at from now on."""
        if self.finished is not None:
            return
        if phase == "validate":
            self._evaluated += 1
        if phase == self._phase and phase != "train":
            return
        if phase == "train" and self._phase == "first-batch" and self._evaluated == 0 and self.steps == 0:
            return
        self._phase = phase
        self._opened().beat(phase, self.steps)

    def part(self, part: str) -> None:
        """Which part of a step begins; what is logged in a validation or a save is theirs."""
        if self.finished is None and self._phase == "train":
            self._opened().at(part)

    def boundary(self, state: TrainerState, control: TrainerControl) -> None:
        """Behind an optimizer step, before the Trainer logs, evaluates and saves."""
        if self.finished is not None or self._boundary is None:
            return
        self.steps = state.global_step
        self._measured = {}
        self._phase = "train"
        self._opened().beat("train", self.steps)
        ends = control.should_training_stop
        self._agreed = None if ends else self._boundary.agreed()  # a training that ends here is not stopped
        if self._agreed == "stop":
            assert self._ending is not None
            self._ending.agreed()
        self.epoch_over = False
        self._last_of_epoch = ends or control.should_epoch_stop or (state.epoch or 0.0).is_integer()
        if self._last_of_epoch:  # a checkpoint has the epoch's evaluation, which a resume would not repeat
            self._deferred, control.should_save = control.should_save, False

    def save_due(self) -> bool:
        """Whether the run needs a checkpoint of this step: for a stop, a request, or as the last one."""
        if self.finished is not None or (self._last_of_epoch and not self.epoch_over):
            return False
        control, agreed = self._hf.control, self._agreed
        self._stopping = agreed == "stop" and not control.should_training_stop
        due = self._deferred or agreed == "save" or (control.should_training_stop and self.epoch_over)
        self._deferred, self._agreed, self._last_of_epoch = False, None, False
        return self._stopping or (due and self._saves is not None and self._saves.saved != self.steps)

    def log(self, state: TrainerState, logs: Mapping[str, Any]) -> None:
        """Adds the numbers of a log to the run's metrics."""
        found = {name: value for name, value in logs.items() if isinstance(value, (int, float))}
        self._measured.update({name: float(value) for name, value in found.items()})
        if self.finished is None:
            self._write_metrics(state.global_step, {"epoch": float(state.epoch or 0), **found})

    def save(self, write: Callable[[], None]) -> None:
        """Commits what the Trainer writes; ends the training for a stop."""
        saves, session = self._saves, self._opened()
        if saves is None or self.finished is not None:
            return
        if self._last_of_epoch and not self.epoch_over:  # requested by a callback behind this one
            self._deferred = True
            return
        failure: Exception | None = None
        if saves.saved != self.steps:
            session.beat("save", self.steps)
            try:
                saves.save(self.steps, self._hf.state, self._own_state(), dict(self._measured), write)
            except Exception as error:
                if not self._stopping:
                    raise
                failure = error
            self.at("train")
        if not self._stopping:
            return
        if failure is None and saves.saved != self.steps:
            failure = saves.unsaved(self.steps)
        assert self._ending is not None
        raise Stopped(self._ending.carry_out(failure))

    def _own_state(self) -> dict[str, Any]:
        number, _ = self.current
        now = compat.Pass(number + 1, self.steps) if self.epoch_over else self.current
        ended = self.epoch_over and self._hf.control.should_training_stop
        # A training may end before its last step, and is over then until it is to take more.
        ended_at = {"ended": self._hf.state.max_steps} if ended else {}
        return {**self._log_positions(), "pass": tuple(now), "samples": compat.samples(self._hf), **ended_at}

    def _finish(self) -> None:
        """The Trainer has reached its end."""
        if self.finished is not None:
            return
        session, saves = self._opened(), self._saves
        assert saves is not None
        if saves.saved != self.steps:
            raise saves.unsaved(self.steps)
        saves.copied()
        self.close_metrics()
        session.complete(step=self.steps, epoch=int(self._hf.state.epoch or 0))
        self.finished = f"step {self.steps}"
        self.say(f"{session.path} is finished: {self.finished}")

    def _finish_writes(self) -> None:
        """Nothing is written in the background."""

    def progress(self) -> object:
        """Steps, and batches of evaluations."""
        return self.steps, self._evaluated, self._phase


class _TrainerCheckpoints(Commits):
    """Commits what the Trainer writes: its folder is the shared state of a checkpoint."""

    def __init__(
        self, session: RunSession, trainer: Trainer, config: CheckpointConfig, copies: CheckpointCopies | None
    ) -> None:
        super().__init__(session, GroupRanks(), copies, get_rank(), config)
        self.keep_all = False
        self._trainer = trainer

    @property
    def policy(self) -> RetentionPolicy:
        """What is kept: without `save_total_limit` all."""
        return replace(super().policy, last=None) if self.keep_all else super().policy

    def save(
        self, step: int, state: TrainerState, own: Mapping[str, Any], metrics: Mapping[str, float], write: Any
    ) -> bool:
        """Has the Trainer write, and commits that; the same on all ranks."""
        metadata = {
            "epoch": int(state.epoch or 0),
            "world_size": get_world_size(),
            "state": "transformers.Trainer",
            "accumulate_grad_batches": self._trainer.args.gradient_accumulation_steps,
        }

        def through_trainer(file: Path, commit: Commit) -> Problem:
            error: Problem = None
            with compat.writes_into(self._trainer, file.parent):
                try:
                    write()
                except write_errors() as raised:
                    error = explained(raised, file)
            error = next((one for one in gather_objects(error) if one is not None), None)
            if error is not None or self._rank:
                return error

            def publish() -> None:
                os.replace(file.parent / f"checkpoint-{step}", file)
                final = self.session.path / "checkpoints" / f"step-{step:08d}" / file.name
                _name_best(file / _TRAINER_STATE, str(file.parent / f"checkpoint-{step}"), str(final))
                commit({})

            return raised_by(publish)

        part = {**own, **compat.loss_since_log(self._trainer)}
        saved = self.commit(step, lambda: part, through_trainer, metrics, metadata)
        self._find_best(state)
        return saved

    def part(self, file: Path, rank: int) -> Mapping[str, Any]:
        """What a rank has written beside a checkpoint; nothing, where fewer ranks have saved."""
        path = file.parent / rank_file(rank)
        found: Any = load_part(path) if path.exists() else {}
        return found if isinstance(found, Mapping) else {}

    def _find_best(self, state: TrainerState) -> None:
        """The best checkpoint is where it was published, not in the stage in which the Trainer has written it."""
        best = state.best_model_checkpoint
        if best is None or os.path.isdir(best) or not state.best_global_step:
            return
        folder = self.session.path / "checkpoints" / f"step-{state.best_global_step:08d}" / "state.ckpt"
        state.best_model_checkpoint = str(folder) if folder.is_dir() else None


def _name_best(file: Path, stage: str, final: str) -> None:
    """Has the state of the Trainer name the checkpoint by its final path."""
    if file.exists():
        content = json.loads(file.read_text(encoding="utf-8"))
        if content.get("best_model_checkpoint") == stage:
            content["best_model_checkpoint"] = final
            file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _number(samples: int | None) -> str:
    return "an unknown number of" if samples is None else str(samples)


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)  # of an enumeration
