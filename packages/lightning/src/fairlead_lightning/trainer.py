"""`Trainer`: Lightning's Trainer, built from a config, with a run directory behind it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self

import lightning.pytorch as L
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.multiprocessing import ProcessExitedException

from fairlead.checks import check_trainer
from fairlead.config import JobConfig, RunConfig, TrainerConfig
from fairlead.errors import ConfigError
from fairlead.exactness import TRIAL, device_reasons, job_digest
from fairlead.findings import raise_errors
from fairlead.interfaces import BuildContext, StopGuard
from fairlead.plugins import PluginManager, default_plugins
from fairlead.user_code import CodeRoot, code_root
from fairlead_distributed.run.joining import join_process_group
from fairlead_distributed.run.opening import handed_over, open_session, run_directory, waiting_handoff
from fairlead_distributed.run.session import STATE_FILE, RunSession
from fairlead_distributed.threads import start_line, use_threads
from fairlead_launch.reports import keep_log
from fairlead_lightning import compat
from fairlead_lightning.build import build_backend, trainer_arguments
from fairlead_lightning.checkpoint.checkpoints import Checkpoints
from fairlead_lightning.checkpoint.committing import copies_of
from fairlead_lightning.checkpoint.loading import readable_load_errors
from fairlead_lightning.checkpoint.rebuilt import Rebuilt, rebuild
from fairlead_lightning.checkpoint.saving import save_on_all_ranks
from fairlead_lightning.display.progress import Progress
from fairlead_lightning.lifecycle.recorder import Recorder
from fairlead_lightning.lifecycle.stops import StopRequested, Stops
from fairlead_lightning.lifecycle.stuck import StuckRanks
from fairlead_lightning.loggers.positions import LOGGER_POSITIONS
from fairlead_lightning.metrics.metrics_file import METRICS_FILE, MetricsFile
from fairlead_lightning.resume.averages import AverageOverRanks
from fairlead_lightning.resume.exact_resume import ExactResume, saved_positions
from fairlead_runs import fingerprint
from fairlead_runs.batch_policy import batch_plan
from fairlead_runs.checkpoint_job import checkpoint_job
from fairlead_runs.describe import described

__all__ = ["Trainer"]


class Trainer(L.Trainer):
    """Lightning's Trainer, built from a typed config; everything else works as in Lightning.

    `fit` keeps a run directory: history, metrics.csv, checkpoints; it resumes from the newest
    complete checkpoint of the run by itself.  `validate`, `test` and `predict` write nothing there
    and never pick up a checkpoint by themselves.  `fast_dev_run` and `barebones` keep no records, but that the
    `fast_dev_run` of a job writes down what it saw of the loaders, for `fairlead explain`.

    Args:
        config: How to train, or a whole job; None: the defaults.
        run: Which run this is; None: that of the job, or a run named after the script.
        callbacks: Lightning callbacks besides those of the config.
        environ: The environment variables; None: this process's.
        plugins: The plugin manager; None: the plugins installed here.
        root: Where the user's code is found; None: found from the working directory.
        guard: What stops a fit on a signal, with handlers that are installed already, as where the trainer is not in
            the main thread; None: made from `trainer.requeue`.

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
        config: TrainerConfig | JobConfig | None = None,
        *,
        run: RunConfig | None = None,
        callbacks: Sequence[L.Callback] = (),
        environ: Mapping[str, str] | None = None,
        plugins: PluginManager | None = None,
        root: CodeRoot | None = None,
        guard: StopGuard | None = None,
    ) -> None:
        job = config if isinstance(config, JobConfig) else None
        trainer_config = job.trainer if job is not None else config
        self.fairlead_config = trainer_config if isinstance(trainer_config, TrainerConfig) else TrainerConfig()
        self.run_config = run or (job.run if job is not None else RunConfig())
        self._job = job
        environ = os.environ if environ is None else environ
        plugins = plugins if plugins is not None else default_plugins()
        self.resolution, findings = check_trainer(
            self.fairlead_config, environ=environ, plugins=plugins, run=self.run_config, purpose="run"
        )
        raise_errors(findings)
        use_threads(self.resolution, environ)
        self.session: RunSession | None = None
        self.rebuilt: Rebuilt | None = None
        """What `from_checkpoint` has built; else None."""
        self._fitted = False
        self._context = BuildContext(self.resolution, environ, plugins)
        root = root or code_root(None, code=self.run_config.code, cwd=Path.cwd())
        arguments = trainer_arguments(self._context, root)
        self.progress = Progress(self.fairlead_config.progress_interval)
        # A user's own bar takes the place of ours; Lightning refuses two.
        theirs = any(isinstance(c, ProgressBar) for c in [*arguments["callbacks"], *callbacks])
        shown = [self.progress] if arguments["enable_progress_bar"] and not theirs else []
        # `fast_dev_run` and `barebones` have nothing to save.
        self.stops = Stops(self.resolution.requeue, self._context, self.progress.say, guard)
        self.stuck = StuckRanks(environ, timeout=getattr(self.resolution.strategy, "timeout", None))
        settings = device_reasons(self.resolution, plugins, self.run_config)
        self.exact = ExactResume(self.run_config.seed, environ=environ, settings=settings, say=self.progress.say)
        kept = [] if self.fairlead_config.barebones else [AverageOverRanks(), self.exact]
        arguments["callbacks"] = [*kept, *arguments["callbacks"], *callbacks, *shown]
        arguments["default_root_dir"] = str(Path(self.run_config.dir).absolute())
        # Fit adds our own checkpoint callback, when it knows the run.
        user_saves = any(isinstance(c, Checkpoint) for c in arguments["callbacks"])
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

        self.stops.listen_early()

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

        `fit()` without arguments goes on in that run from exactly this checkpoint, also where it is not the newest;
        `validate()`, `test()` and `predict()` take its weights.  Of a run directory it is the newest one; of a folder
        of `fairlead checkpoint export`, which has weights only, `fit()` begins a new run with them.

        Args:
            path: A run directory, a checkpoint in it, or an exported folder.
            overrides: Changes to the job, written as for `--set`: `trainer.max_steps=400`.
            callbacks: As in the constructor.
            environ: As in the constructor.
            plugins: As in the constructor.

        Raises:
            CheckpointError: There is no such checkpoint, it carries no job, or the job cannot be built again.
            ConfigError: The job does not fit this machine or launcher.
            UserCodeError: The model's or the data's code was not found, or raised.

        Example:
            >>> trainer = Trainer.from_checkpoint("runs/gpt/checkpoints/step-00000200")  # doctest: +SKIP
            >>> trainer.fit()                                                            # doctest: +SKIP
        """
        plugins = plugins if plugins is not None else default_plugins()
        found = checkpoint_job(Path(path), plugins=plugins, cwd=Path.cwd(), overrides=overrides)
        job, root = found.loaded.job, found.loaded.root
        assert job is not None
        # A new run of its own for bare weights: an older run of the job's name is none of theirs.
        resume = "never" if found.weights is not None else str(found.checkpoint or "auto")
        if ("run", "resume") not in found.loaded.overrides:
            job = job.model_copy(update={"run": job.run.model_copy(update={"resume": resume})})
        if job.run.seed is not None:
            L.seed_everything(job.run.seed, workers=True, verbose=False)
        trainer = cls(job, callbacks=callbacks, environ=environ, plugins=plugins, root=root)
        trainer.rebuilt = rebuild(job, root, checkpoint=found.checkpoint, weights=found.weights)
        return trainer

    def __getstate__(self) -> dict[str, Any]:
        """A plugin manager cannot be pickled, and ranks that are spawned do not need it."""
        return {**self.__dict__, "_context": None}

    # -- fit

    def fit(
        self,
        model: L.LightningModule | None = None,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: L.LightningDataModule | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Trains, or goes on training, until a limit of the config is reached.

        Args:
            model: The model; None: that of `from_checkpoint`, and its data where none is given.
            train_dataloaders: Loaders, or a datamodule, as in Lightning.
            val_dataloaders: Loaders.
            datamodule: The data.
            ckpt_path: A checkpoint to start from while the run has none of its own.
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
        environ = self._context.environ
        self._fitted = True
        if self.fairlead_config.fast_dev_run or self.fairlead_config.barebones:
            path = os.fspath(ckpt_path) if ckpt_path is not None else None
            self._join()
            self.exact.trial = self._trial()
            super().fit(model, train_dataloaders, val_dataloaders, datamodule, path, weights_only)
            return
        # Of a job file, all ranks must have read the same; what a script hands over may well differ in some repr.
        self._join(fingerprint(self._job.model_dump(mode="json")).digest if self._job is not None else None)
        session = open_session(
            self._described(model, datamodule),
            self.resolution,
            self.run_config,
            environ=environ,
            ckpt_path=ckpt_path,
            copies=copies_of(self.strategy.checkpoint_io),
        )
        self.session = session
        # Ranks that Lightning starts from this process run the script again, and have to be told.
        started = handed_over(session) if self._starts_ranks() else nullcontext()
        if session.finished:
            self.progress.say(f"{session.path} is finished: {session.finished}; nothing to do")
            if self._job is not None or session.checkpoint is None:
                with started:
                    session.close()
                return
            # What follows in a script wants the weights, the metrics and the best checkpoint. Lightning restores them,
            # sees that the limits are reached, and trains no further.
        with session, self._attached(session):
            self.stops.begin(session)
            if self._trains_here() and not self._starts_ranks() and not session.finished:
                value = self.resolution.value
                session.join(int(value("global_rank")), int(value("local_rank")), int(value("node_rank")))
                session.beat("prepare", 0)
            if not session.finished:
                keep_log(environ, session.path / "logs")
            if self.progress in vars(self)["callbacks"] and not session.finished:
                self.progress.say(start_line(self.resolution))
            for message in session.messages:
                self.progress.say(message)
            resume = session.checkpoint
            with started, readable_load_errors(resume), self._spawns(session):
                super().fit(
                    model,
                    train_dataloaders,
                    val_dataloaders,
                    datamodule,
                    ckpt_path=str(resume) if resume is not None else None,
                    weights_only=weights_only,
                )
            if self.progress in vars(self)["callbacks"] and self._trains_here() and not session.finished:
                self.progress.summary(self, session.path)

    def save_checkpoint(
        self,
        filepath: str | Path,
        weights_only: bool | None = None,
        storage_options: Any | None = None,
    ) -> None:
        """As in Lightning; with `checkpoint_io: distributed` every rank writes its part."""
        if self.model is None or not save_on_all_ranks(self, filepath, weights_only, storage_options):
            super().save_checkpoint(filepath, weights_only, storage_options)

    def validate(self, *args: Any, **kwargs: Any) -> Any:
        """As in Lightning, once the ranks have met; so are `test` and `predict`.

        Without a model they take that of `from_checkpoint`, with its data and, before a fit, its weights.
        """
        self._join()
        return super().validate(*args, **self._of_checkpoint(args, kwargs))

    def test(self, *args: Any, **kwargs: Any) -> Any:
        """See `validate`."""
        self._join()
        return super().test(*args, **self._of_checkpoint(args, kwargs))

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """See `validate`."""
        self._join()
        return super().predict(*args, **self._of_checkpoint(args, kwargs))

    def _of_checkpoint(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of an evaluation; what is not given is that of `from_checkpoint`."""
        given = dict(kwargs)
        if self.rebuilt is None or args or given.get("model") is not None:
            return given
        given["model"] = self.rebuilt.model
        if given.get("dataloaders") is None and given.get("datamodule") is None:
            given["datamodule"] = self.rebuilt.data
        checkpoint = self.rebuilt.checkpoint
        if given.get("ckpt_path") is None and checkpoint is not None and not self._fitted:
            state = checkpoint / STATE_FILE
            given["ckpt_path"] = str(state if state.exists() else checkpoint)
        return given

    def _join(self, config_hash: str | None = None) -> None:
        """The ranks that a launcher started meet, unless Lightning starts them and they meet there."""
        if waiting_handoff(self._context.environ) is None:
            join_process_group(self.resolution, self._context.environ, config_hash=config_hash)

    def _trial(self) -> tuple[Path, str] | None:
        """Where a job that is only tried leaves what it saw of loaders and state, for `explain`; a script nowhere."""
        if self._job is None:
            return None
        job = self._job.model_dump(mode="json")
        path = run_directory(job, self.run_config, self._context.environ, Path.cwd())
        return path / "starts" / str(TRIAL), job_digest(job)

    def _described(self, model: L.LightningModule, datamodule: L.LightningDataModule | None) -> dict[str, Any]:
        """The job as plain data; from Python, model and data are described by class and hyperparameters."""
        if self._job is not None:
            return self._job.model_dump(mode="json")
        return {
            "run": self.run_config.model_dump(mode="json"),
            "model": described(model),
            "data": described(datamodule) if datamodule is not None else None,
            "trainer": self.fairlead_config.model_dump(mode="json"),
        }

    @contextmanager
    def _attached(self, session: RunSession) -> Iterator[None]:
        """Gives this fit its records: loggers, checkpoints, history; what comes after it must not write there."""
        root_dir = Path(self.default_root_dir)
        compat.set_root_dir(self, session.path)
        self.loggers = [] if session.finished else self._run_loggers(session)
        self.accumulate_grad_batches = batch_plan(self.resolution, session.previous).accumulate_grad_batches
        attached: list[L.Callback] = vars(self)["callbacks"]
        kept = [c for c in attached if not isinstance(c, Checkpoints)]
        if self.fairlead_config.enable_checkpointing:
            self.exact.saves = Checkpoints(self.fairlead_config.checkpoint, session, self.exact)
            kept.append(self.exact.saves)
        # Last, and in this order: a stop is carried out when all others have had their say.
        self.callbacks = kept if session.finished else [*kept, Recorder(session), self.stuck, self.stops]
        self.exact.session, self.exact.stops, self.stops.saves = session, self.stops, self.exact.saves
        self.stuck.session = session
        try:
            yield
        finally:
            self.stops.end()
            self.exact.session = self.exact.saves = self.exact.stops = self.stuck.session = None
            self.callbacks = kept  # `checkpoint_callback.best_model_path` is asked for after the fit
            self.loggers = []
            compat.set_root_dir(self, root_dir)

    def _run_loggers(self, session: RunSession) -> list[Logger]:
        positions = saved_positions(session)
        context = BuildContext(
            self.resolution,
            self._context.environ,
            self._context.plugins,
            run_dir=session.path,
            extras={
                "resumed": session.resumed,
                "resume_step": session.resume_step,
                LOGGER_POSITIONS: positions,
                "run_name": session.path.name,
            },
        )
        return [
            MetricsFile(session.path, resume_step=session.resume_step, position=positions.get(METRICS_FILE)),
            # `csv` builds nothing: the run's own file is that logger.
            *filter(None, (build_backend(logger, context) for logger in self.resolution.loggers)),
        ]

    def _starts_ranks(self) -> bool:
        """Whether Lightning is to start the other ranks, each running this script from its first line."""
        return self._trains_here() and not self.resolution.topology.launched and self.resolution.world_size > 1

    @contextmanager
    def _spawns(self, session: RunSession) -> Iterator[None]:
        """With `ddp_spawn` the signals come to this process as well, and what the ranks end with is raised here."""
        if self._trains_here():
            yield
            return
        self.stops.pass_on(self)
        try:
            yield
        except ProcessExitedException as ended:
            code = session.children_stopped(ended)
            if code is None:
                raise
            raise StopRequested(code) from ended

    def _trains_here(self) -> bool:
        """Whether this process is one of the ranks; with `ddp_spawn` it only waits for them."""
        return getattr(self.resolution.strategy, "start_method", "popen") == "popen"
