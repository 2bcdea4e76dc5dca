"""`Trainer`: Lightning's Trainer, built from a config, with a run directory behind it."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Self

import lightning.pytorch as L
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from fairlead.config import JobConfig, RunConfig, TrainerConfig
from fairlead.errors import ConfigError
from fairlead.exactness import TRIAL, device_reasons, job_digest
from fairlead.interfaces import BuildContext
from fairlead.plugins import PluginManager, default_plugins
from fairlead.resolve import Resolution
from fairlead.user_code import CodeRoot, code_root
from fairlead.validation import as_config
from fairlead_distributed.objects import on_rank_0
from fairlead_distributed.predictions.reading import Predictions
from fairlead_distributed.process_group import leave_at_exit
from fairlead_distributed.run.commits import copies_of
from fairlead_distributed.run.opening import file_to_evaluate, open_session
from fairlead_distributed.run.scripts import advice_for_scripts, described_job
from fairlead_distributed.run.session import RunSession
from fairlead_distributed.threads import start_line, use_threads
from fairlead_launch.output import copy_output
from fairlead_launch.reports import announce_run
from fairlead_lightning import compat
from fairlead_lightning.build import trainer_arguments
from fairlead_lightning.checkpoint.rebuilt import Rebuilt, rebuild
from fairlead_lightning.checkpoint.saving import save_on_all_ranks
from fairlead_lightning.display.progress import Progress
from fairlead_lightning.fit import (
    handing_over,
    join_ranks,
    plan,
    run_loggers,
    starts_ranks,
    training,
    trains_here,
)
from fairlead_lightning.fit_callback import FitCallback
from fairlead_lightning.metrics.predictions import predict_distributed
from fairlead_lightning.resume.users import owners_of_fit
from fairlead_runs import fingerprint
from fairlead_runs.batch_size import batch_plan
from fairlead_runs.checkpoint_job import checkpoint_job
from fairlead_runs.describe import described
from fairlead_runs.evaluated import Weights, weights_to_evaluate
from fairlead_runs.guard import StopGuard
from fairlead_runs.naming import run_directory


class Trainer(L.Trainer):
    """Lightning's Trainer, built from a typed config; everything else works as in Lightning.

    `fit` keeps a run directory: history, metrics.csv, checkpoints; it resumes from the newest
    complete checkpoint of the run by itself.  `validate`, `test` and `predict` write nothing there;
    before a fit they take the run's best checkpoint, or its newest, and say which.  `fast_dev_run` and `barebones` keep
    no records, but that the
    `fast_dev_run` of a job writes down what it saw of the loaders, for `fairlead explain`.

    Args:
        config: How to train, as a config or a mapping of its fields; or a complete job; None: the defaults.
        run: Which run this is, as a config or a mapping of its fields; None: that of the job, or a run named after the
            script.
        callbacks: Lightning callbacks besides those of the config.
        environ: The environment variables; None: this process's.
        plugins: The plugin manager; None: the plugins installed here.
        root: Where the user's code is found; None: found from the working directory.
        guard: What stops a fit on a signal, with handlers that are installed already, as where the trainer is not in
            the main thread; None: made from `trainer.requeue`.
        resolution: The settings, where they are resolved and checked already; None: that is done here.

    Raises:
        ConfigError: The config is wrong, or does not fit this machine or launcher.
        MissingDependencyError: A plugin or its engine is not installed.

    Example:
        >>> from fairlead import RunConfig, Trainer, TrainerConfig
        >>> trainer = Trainer(TrainerConfig(max_steps=100), run=RunConfig(name="first"))  # doctest: +SKIP
        >>> trainer.fit(model, datamodule)  # doctest: +SKIP
    """

    def __init__(
        self,
        config: TrainerConfig | JobConfig | Mapping[str, Any] | None = None,
        *,
        run: RunConfig | Mapping[str, Any] | None = None,
        callbacks: Sequence[L.Callback] | L.Callback = (),
        environ: Mapping[str, str] | None = None,
        plugins: PluginManager | None = None,
        root: CodeRoot | None = None,
        guard: StopGuard | None = None,
        resolution: Resolution | None = None,
    ) -> None:
        environ = os.environ if environ is None else environ
        plugins = plugins if plugins is not None else default_plugins()
        job = config if isinstance(config, JobConfig) else None
        how, which = (job.trainer, job.run) if job is not None else ({} if config is None else config, {})
        self.fairlead_config = as_config(TrainerConfig, how, "Trainer", plugins)
        self.run_config = as_config(RunConfig, which if run is None else run, "Trainer, run", plugins)
        self._job = job
        self._anonymous = run is None and job is None
        callbacks = [callbacks] if isinstance(callbacks, L.Callback) else list(callbacks)
        if wrong := [one for one in callbacks if not isinstance(one, L.Callback)]:
            what = f"a {type(wrong[0]).__name__} is no callback of Lightning's"
            raise ConfigError(what, where="Trainer, callbacks", fix="derive it from lightning.pytorch.Callback")
        self.resolution = resolution or plan(
            self.fairlead_config, environ=environ, plugins=plugins, run=self.run_config
        )
        use_threads(self.resolution, environ)
        self.session: RunSession | None = None
        self.rebuilt: Rebuilt | None = None
        """What `from_checkpoint` has built; else None."""
        self._fitted = False
        self._context = BuildContext(self.resolution, environ, plugins)
        self.progress = Progress(self.fairlead_config.progress_interval, environ=environ)
        self.fit_callback = FitCallback(
            self._context,
            say=self.progress.say,
            seed=self.run_config.seed,
            inexact=device_reasons(self.resolution, plugins, self.run_config),
            guard=guard,
            job=job,
        )
        self._root = root or code_root(None, code=self.run_config.code, cwd=Path.cwd())
        arguments = trainer_arguments(self._context, self._root)
        given = [*arguments["callbacks"], *callbacks]
        # A user's own bar replaces ours; Lightning refuses two.
        self._shows = arguments["enable_progress_bar"] and not any(isinstance(c, ProgressBar) for c in given)
        shown = [self.progress] if self._shows else []
        arguments["callbacks"] = [*self.fit_callback.initial_callbacks(), *given, *shown]
        arguments["default_root_dir"] = str(Path(self.run_config.dir).absolute())
        # Fit adds our own checkpoint callback, when it knows the run.
        user_saves = any(isinstance(c, Checkpoint) for c in given)
        arguments["enable_checkpointing"] = user_saves and self.fairlead_config.enable_checkpointing
        try:
            super().__init__(**arguments)
        except (MisconfigurationException, TypeError, ValueError) as error:
            raise ConfigError(
                "Lightning refuses these settings",
                where="trainer",
                why=str(error),
                fix="see the documentation of lightning.pytorch.Trainer",
            ) from error
        self.fit_callback.stops.listen_early()

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        *,
        overrides: Sequence[str] = (),
        callbacks: Sequence[L.Callback] = (),
        environ: Mapping[str, str] | None = None,
        plugins: PluginManager | None = None,
    ) -> Self:
        """A trainer with the model and data of the run that made a checkpoint: `trainer.rebuilt`.

        `fit()` without arguments continues that run from exactly this checkpoint, also where it is not the newest;
        `validate()`, `test()` and `predict()` take its weights.  Of a run directory it is the newest one; of a folder
        of `fairlead checkpoint export`, which has weights only, `fit()` begins a new run with them.

        Args:
            path: A run directory, a checkpoint in it, or an exported folder.
            overrides: Changes to the job, written as for `--set`: `trainer.max_steps=400`.
            callbacks: As in the constructor.
            environ: As in the constructor.
            plugins: As in the constructor.

        Raises:
            CheckpointError: There is no such checkpoint, it carries no job, or the job cannot be rebuilt.
            ConfigError: The job does not fit this machine or launcher.
            UserCodeError: The model's or the data's code was not found, or raised.

        Example:
            >>> trainer = Trainer.from_checkpoint("runs/gpt/checkpoints/step-00000200")  # doctest: +SKIP
            >>> trainer.fit()                                                            # doctest: +SKIP
        """
        plugins = plugins if plugins is not None else default_plugins()
        environ = os.environ if environ is None else environ
        found = checkpoint_job(Path(path), plugins=plugins, cwd=Path.cwd(), environ=environ, overrides=overrides)
        job, root = found.loaded.job, found.loaded.root
        assert job is not None
        # A new run for bare weights: an older run of the job's name does not belong to them.
        resume = "never" if found.weights is not None else str(found.checkpoint or "auto")
        if ("run", "resume") not in found.loaded.overrides:
            job = job.model_copy(update={"run": job.run.model_copy(update={"resume": resume})})
        if job.run.seed is not None:
            L.seed_everything(job.run.seed, workers=True, verbose=False)
        trainer = cls(job, callbacks=callbacks, environ=environ, plugins=plugins, root=root)
        trainer.rebuilt = rebuild(job, trainer.resolution, root, checkpoint=found.checkpoint, weights=found.weights)
        return trainer

    def __getstate__(self) -> dict[str, Any]:
        """A plugin manager cannot be pickled, and ranks that are spawned do not need it."""
        return {**self.__dict__, "_context": None}

    def fit(
        self,
        model: L.LightningModule | None = None,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: L.LightningDataModule | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Trains, or resumes training, until a limit of the config is reached.

        Args:
            model: The model; None: that of `from_checkpoint`, and its data where none is given.
            train_dataloaders: Loaders, or a datamodule, as in Lightning.
            val_dataloaders: Loaders.
            datamodule: The data.
            ckpt_path: A checkpoint to start from while the run has none yet.
            weights_only: As in Lightning; None: True, so that loading runs no code from the file.

        Raises:
            FairleadError: The run directory is locked, of another run, or not writable; a
                checkpoint is damaged or of another model.
        """
        if isinstance(train_dataloaders, L.LightningDataModule):
            train_dataloaders, datamodule = None, train_dataloaders
        if model is None:
            if self.rebuilt is None:
                raise ConfigError(
                    "fit needs a model", where="Trainer.fit", fix="give one, or make the trainer with from_checkpoint"
                )
            model = self.rebuilt.model
            if train_dataloaders is None and datamodule is None:
                datamodule = self.rebuilt.data
        self._fitted = True
        loaders = (train_dataloaders, val_dataloaders, datamodule)
        if self.fairlead_config.fast_dev_run or self.fairlead_config.barebones:
            self._try(model, *loaders, os.fspath(ckpt_path) if ckpt_path is not None else None, weights_only)
            return
        environ, resolution = self._context.environ, self.resolution
        # Of a job file, all ranks must have read the same; what a script hands over may well differ in some repr.
        digest = fingerprint(self._job.model_dump(mode="json")).digest if self._job is not None else None
        join_ranks(resolution, environ, digest)
        job = self._described(model, datamodule)
        copies = copies_of(self.strategy.checkpoint_io)
        with advice_for_scripts() if self._job is None else nullcontext():
            session = open_session(
                job, resolution, self.run_config, environ=environ, ckpt_path=ckpt_path, copies=copies
            )
        self.session = session
        if session.proof is not None:
            session.proof.watch(partial(owners_of_fit, self), self._root.folders)
        if session.finished is not None:
            self.progress.say(f"{session.path} is finished: {session.finished}; nothing to do")
            if self._job is not None or session.checkpoint is None:
                with handing_over(session, resolution):
                    session.close()
                return
            # What follows in a script wants the weights, the metrics and the best checkpoint. Lightning restores them,
            # sees that the limits are reached, and trains no further.
        with session, self._attached(session):
            self._begin(session)
            with training(self, session, resolution, self.fit_callback.stops):
                super().fit(model, *loaders, str(session.checkpoint) if session.resumed else None, weights_only)
            if self._shows and trains_here(resolution) and session.finished is None:
                self.progress.summary(self, session.path)

    def _try(self, model: L.LightningModule, *arguments: Any) -> None:
        """A fit that keeps no records; of a job, `explain` gets what was seen of loaders and state."""
        join_ranks(self.resolution, self._context.environ)
        if self._job is not None:
            job = self._job.model_dump(mode="json")
            path = run_directory(job, self.run_config, self.resolution.job, Path.cwd())
            self.fit_callback.exact.begin_trial(path / "starts" / str(TRIAL), job_digest(job))
        super().fit(model, *arguments)

    @contextmanager
    def _attached(self, session: RunSession) -> Iterator[None]:
        """Gives this fit its records: loggers, checkpoints, history; what comes after it must not write there."""
        root_dir = Path(self.default_root_dir)
        checkpoint = self.fairlead_config.checkpoint if self.fairlead_config.enable_checkpointing else None
        self.accumulate_grad_batches = batch_plan(self.resolution, session.previous)
        try:
            compat.set_root_dir(self, session.path)
            loggers = run_loggers(session, self._context) if session.finished is None else []
            self.fit_callback.attach(self, session, checkpoint, loggers)
            yield
        finally:
            # Evaluations draw from the same loaders, and ask for `checkpoint_callback.best_model_path`.
            self.fit_callback.detach(self, keep=True)
            compat.set_root_dir(self, root_dir)

    def _begin(self, session: RunSession) -> None:
        """This rank has joined, where that is known before Lightning has started others; prints what begins."""
        resolution, environ = self.resolution, self._context.environ
        if session.finished is None:
            if trains_here(resolution) and not starts_ranks(resolution):
                session.join(*(int(resolution.value(name)) for name in ("global_rank", "local_rank", "node_rank")))
                session.beat("prepare", 0)
            if not announce_run(environ, session.path, session.start) and resolution.topology.launched:
                copy_output(session.path / "logs", int(resolution.value("global_rank")))
            if self._shows:
                self.progress.say(start_line(resolution))
        for message in session.messages:
            self.progress.say(message)

    def save_checkpoint(
        self, filepath: str | Path, weights_only: bool | None = None, storage_options: Any | None = None
    ) -> None:
        """As in Lightning; with `checkpoint_io: distributed` every rank writes its part."""
        if self.model is None or not save_on_all_ranks(self, filepath, weights_only, storage_options):
            super().save_checkpoint(filepath, weights_only, storage_options)

    def validate(self, *args: Any, **kwargs: Any) -> Any:
        """As in Lightning, with the trained weights; without a model with that of `from_checkpoint`, and its data.

        `ckpt_path` may also be `auto`, `never`, `best`, `last` or a run directory. Without one, and before a `fit`, it
        is `run.resume`: `auto` is the run's best checkpoint by the metric that it monitors, else its newest, and a line
        says which; `never` is the model as it is given.

        Raises:
            CheckpointError: The run, or the one that is named, has no complete checkpoint. Of a trainer that was given
                neither a job nor a run, the model is evaluated as it is, and a line says so.
        """
        return self._evaluate("validate", args, kwargs)

    def test(self, *args: Any, **kwargs: Any) -> Any:
        """See `validate`."""
        return self._evaluate("test", args, kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """See `validate`."""
        return self._evaluate("predict", args, kwargs)

    def distributed_predict(
        self,
        model: Any = None,
        dataloaders: Any = None,
        *,
        output_dir: str | os.PathLike[str] | None = None,
        **more: Any,
    ) -> Predictions | None:
        """`predict` on all ranks, into one folder: `output_dir`, or the next `predictions-N` in the run directory.

        Started again after a kill, it continues. All ranks have to see the folder. See `Predictions`.
        """
        job = self._described(model, more.get("datamodule"))
        run = run_directory(job, self.run_config, self.resolution.job, Path.cwd())
        return predict_distributed(self, output_dir, run, job, model=model, dataloaders=dataloaders, **more)

    def _evaluate(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        given = self._evaluation(name, args, kwargs)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The dirpath has changed")  # nothing is saved there now
            return getattr(super(), name)(**given)

    def _evaluation(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The ranks meet; the arguments, where what is not given is that of `from_checkpoint`, with the weights."""
        join_ranks(self.resolution, self._context.environ)
        leave_at_exit()  # a fit's recorder sees to it
        bound = inspect.signature(getattr(L.Trainer, name)).bind_partial(self, *args, **kwargs).arguments
        given = {key: value for key, value in bound.items() if key != "self"}
        loads = True
        if given.get("model") is None and self.rebuilt is not None:
            given["model"] = self.rebuilt.model
            if given.get("dataloaders") is None and given.get("datamodule") is None:
                given["datamodule"] = self.rebuilt.data
            loads = self.rebuilt.loads
        requested = given.get("ckpt_path")
        if requested is None and loads and not self._fitted:
            requested = self.run_config.load or self.run_config.weights or self.run_config.resume
            if self.rebuilt is not None and self.rebuilt.checkpoint is not None:
                requested = self.rebuilt.checkpoint
        if requested is not None:
            given["ckpt_path"] = self._weights(os.fspath(requested), given)
        return given

    def _weights(self, requested: str, given: Mapping[str, Any]) -> str | None:
        """The file to load for a requested `ckpt_path`; None: the model as it is. The same on all ranks."""
        if self._fitted and requested == "best":
            return requested  # Lightning knows that of this fit, also where a ModelCheckpoint has written it
        name, data = given.get("model"), given.get("datamodule")
        if name is None:
            name = self.lightning_module
        run = run_directory(self._described(name, data), self.run_config, self.resolution.job, Path.cwd())
        never = 'ckpt_path="never", or RunConfig(resume="never")'

        def found() -> Weights:
            if requested == "auto" and self._anonymous and not run.exists():
                return Weights(None, f"weights     as the model is given: {run} is no run")
            return weights_to_evaluate(requested, run, Path.cwd(), never=never)

        weights = on_rank_0(found)  # another rank may not see a new checkpoint yet
        source = weights.source
        if requested in ("auto", "best", "last"):
            self.progress.say(weights.line)
        return str(file_to_evaluate(source)) if source is not None else None

    def _described(self, model: L.LightningModule, datamodule: L.LightningDataModule | None) -> dict[str, Any]:
        """The job as plain data; from Python, model and data are described by class and hyperparameters."""
        if self._job is not None:
            return self._job.model_dump(mode="json")
        data = described(datamodule) if datamodule is not None else None
        return described_job(self.run_config, described(model), data, self.fairlead_config.model_dump(mode="json"))
