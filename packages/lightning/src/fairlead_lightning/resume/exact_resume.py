"""`ExactResume`: a fit that resumes from a checkpoint does what the fit that saved it would have done next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import lightning.pytorch as L
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.nn.parallel import DistributedDataParallel

from fairlead.config import TrainerConfig
from fairlead.config.marks import NotExact, marked
from fairlead.findings import Finding, Inexact
from fairlead_distributed import register_exact_reduction
from fairlead_distributed.batch_order import EpochPosition
from fairlead_distributed.objects import broadcast_object
from fairlead_distributed.run.commits import seed_anew
from fairlead_distributed.run.exactness import ExactnessRecord, kernel_reasons, unseeded
from fairlead_distributed.run.loading import as_it_was_saved, load_weights
from fairlead_distributed.run.session import RunSession
from fairlead_lightning import compat
from fairlead_lightning.resume import rank_state
from fairlead_lightning.resume.configured import Configured
from fairlead_lightning.resume.loaders import LoaderRequests, Loaders
from fairlead_lightning.resume.rank_state import plain_names
from fairlead_lightning.resume.users import Users, only_once, with_plain_numbers
from fairlead_runs.logger_positions import LOGGER_POSITIONS, Positioned, logger_positions

Where = Literal["between", "batch", "done", "cut"]
"""Between two epochs; a batch is done, but not the validation behind it; both are; a limit has cut the epoch."""

_SEED: Final = "PL_GLOBAL_SEED"  # Lightning's seed_everything leaves it


class ExactResume:
    """Makes loaders ready, restores what Lightning does not, and says where a checkpoint can be written.

    Attached to every fit, validation and test; what it saves and restores belongs to fits with a run directory.
    """

    def __init__(
        self,
        seed: int | None = None,
        *,
        environ: Mapping[str, str],
        settings: Sequence[Inexact] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.seed = seed
        self._environ = environ
        self._settings = settings
        self._in_order = True
        self._same_ranks = True
        self._say = say
        self._session: RunSession | None = None
        self._made: Callable[[object], None] = _nothing
        self._restored: Callable[[Mapping[str, Any]], None] = _nothing
        self._record: ExactnessRecord | None = None
        self.loaders: Loaders | None = None
        self.where: Where | None = None
        self.goes_on = False  # of a run that was stopped, and no batch was trained on yet
        self.resumed = False  # a run that was stopped
        self.for_training = False  # the loaders requested: a batch-size finder requests a validation's in training
        self._trainer: L.Trainer | None = None
        self._state: dict[str, Any] | None = None
        self._validating: dict[str, Any] | None = None
        self._requests = LoaderRequests()
        self._undo: list[Callable[[], None]] = []
        self._users = Users()
        self._step = -1
        self._configured: Configured | None = None
        self._changed: list[Inexact] = []

    def __getstate__(self) -> dict[str, Any]:
        """Spawned ranks begin with `setup`."""
        anew: dict[str, Any] = {"_trainer": None, "loaders": None, "_undo": [], "_users": Users(), "_configured": None}
        return {**self.__dict__, **anew, "_environ": dict(self._environ)}

    def begin(
        self,
        session: RunSession,
        made: Callable[[object], None],
        restored: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """A fit of this run begins.

        `made` is given each loader that is ready; `restored` what this rank has saved, once that is restored.
        """
        self._session, self._made, self._restored = session, made, restored
        self._record = ExactnessRecord(session.path / "starts" / str(session.start), session.job_digest, self._print)

    def begin_trial(self, start: Path, digest: str) -> None:
        """A `fast_dev_run` begins: what it sees of loaders and state is written down there, with the `job_digest`."""
        self._record = ExactnessRecord(start, digest, self._print)

    def end(self) -> None:
        """The fit is over; what comes after it is none of that run's."""
        self._session = self._record = None
        self._made = self._restored = _nothing
        self.uninstall()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Before Lightning asks for the loaders; the ranks are connected."""
        self.uninstall()
        self._trainer, self.where, self._state, self._validating = trainer, None, None, None
        self._requests = LoaderRequests()
        session = self._session if stage == "fit" else None
        self._same_ranks = True
        self._configured, self._changed = Configured(trainer) if session is not None else None, []
        if session is not None and session.weights is not None:
            load_weights(pl_module, session.weights)
        if session is not None and session.checkpoint is not None and session.previous is not None:
            folder = session.checkpoint.parent
            self._same_ranks = rank_state.same_ranks(session.previous, trainer)
            self._state = rank_state.read(folder, trainer.global_rank if self._same_ranks else 0)
            self._requests.resume(self._state if self._same_ranks else None)
        saved = self._state["loaders"] if self._state is not None else None
        self.goes_on = self.resumed = self._state is not None
        if self.goes_on:
            self._undo.append(as_it_was_saved(pl_module))
        self._undo.append(plain_names(trainer))
        shards = False
        if stage != "predict":
            shards, undo = compat.take_sharding(trainer)
            self._undo += [undo, self._prepare_loaders(trainer)]
        self._users = Users()
        self.loaders = Loaders(
            trainer,
            attributes=self._users.attributes,
            seed=self._common_seed(saved),
            position=self.position,
            shards=shards,
            saved=saved,
            same_ranks=self._same_ranks,
        )
        if session is not None:
            self._undo.append(compat.count_steps(trainer, lambda: self._report_uncounted(trainer)))
        if self.goes_on and stage == "fit":
            steps, trainer.num_sanity_val_steps = trainer.num_sanity_val_steps, 0  # it was done when the run began
            self._undo.append(lambda: setattr(trainer, "num_sanity_val_steps", steps))
            self._undo += [only_once(trainer), compat.keep_rates(trainer)]

    def _report_uncounted(self, trainer: L.Trainer) -> None:
        if trainer.is_global_zero and not self.resumed:
            finding = Finding(
                "info",
                "steps-uncounted",
                "the module steps an optimizer where Lightning does not count it: Fairlead does",
                why="by optimizers(use_pl_optimizer=False), or in a hook; Lightning's global_step would stay behind, "
                "and with it max_steps, what is logged, and the names of checkpoints",
                fix="nothing; self.optimizers() and its step() in training_step are counted by Lightning itself",
            )
            self._print(str(finding))

    def _print(self, text: str) -> None:
        assert self._trainer is not None
        (self._say or self._trainer.print)(text)

    def fit_starts(self, trainer: L.Trainer) -> None:
        """The model is wrapped: a script's own DDP adds gradients in a fixed order where that costs little."""
        if self._state is not None and self._state["where"] in ("between", "cut"):
            trainer.should_stop = self._state["should_stop"]  # Lightning looks at it before its loops begin
        if self._configured is not None:
            self._configured.optimizers_made(trainer)
        if self._record is not None:
            self._users.watch(trainer, self._state)
        if self._state is not None:
            self._users.restore_before_loaders(self._state, same_ranks=self._same_ranks)
        self.reduce_in_order(trainer)

    def reduce_in_order(self, trainer: L.Trainer) -> None:
        """A script's own DDP was built: has it add gradients in a fixed order where that costs little."""
        model = trainer.strategy.model
        if self._settings is None and isinstance(model, DistributedDataParallel):
            unchanged = model.find_unused_parameters and not model.static_graph  # DDP keeps its first buckets then
            self._in_order = register_exact_reduction(model, auto=True) or trainer.world_size <= 2 or unchanged

    def training_starts(self, trainer: L.Trainer) -> None:
        """The loaders were seen: says and writes down what has changed, and whether a resume is exact."""
        session, configured = self._session, self._configured if trainer.is_global_zero else None
        if configured is not None and session is not None:
            self._changed = configured.announce(trainer, session, self._print)
        self._record_reasons(trainer)
        if configured is not None and session is not None:
            configured.write(session.path / "starts" / str(session.start))

    def _record_reasons(self, trainer: L.Trainer) -> None:
        if self.loaders is None or self._record is None or not trainer.is_global_zero:
            return
        settings = list(self._settings or ())
        if self._settings is None:
            settings = list(script_reasons(trainer, seeded=_SEED in self._environ, in_order=self._in_order))
        state = [*self.loaders.reasons, *state_reasons(trainer), *self._users.reasons(), *self._changed]
        silent = self._changed if self._session is not None else settings  # of a trial only what it was made for
        self._record.update(settings, state, trainer.world_size, silent=silent)

    def fit_ends(self, trainer: L.Trainer) -> None:
        """Nothing was left to train: what comes after the fit finds what it would have found."""
        if self._state is not None:
            self._restore(trainer)

    @staticmethod
    def correct(checkpoint: dict[str, Any]) -> None:
        """Lightning's own entry for loaders has rank 0's for all, and plain Lightning could not read ours there."""
        checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)
        with_plain_numbers(checkpoint)

    def on_exception(self, trainer: L.Trainer) -> None:
        """An exception has left the fit: an incomplete state is not saved."""
        if trainer.training and self.where is None and compat.training_position(trainer)[1] == 0:
            self.where = "between"  # Lightning stops behind an epoch, too

    def before_batch(self, trainer: L.Trainer) -> None:
        """From here on the state is incomplete."""
        self.where, self._step = None, trainer.global_step
        if self.goes_on and self.loaders is not None:
            self.goes_on = False
            self.loaders.begun()

    def _prepare_loaders(self, trainer: L.Trainer) -> Callable[[], None]:
        """Has the strategy hand each loader to `Loaders` first.  Returns what ends it."""
        attributes: dict[str, Any] = vars(trainer.strategy)
        process = trainer.strategy.process_dataloader

        def process_dataloader(loader: object) -> object:
            assert self.loaders is not None
            ready = self.loaders.prepare(loader, training=self.for_training)
            self._made(ready)
            return process(ready)

        attributes["process_dataloader"] = process_dataloader
        return lambda: attributes.pop("process_dataloader", None)

    def position(self) -> EpochPosition:
        """Where the training is, in batches of this rank."""
        assert self._trainer is not None
        if self.where == "cut":
            loop: Any = self._trainer.fit_loop
            return EpochPosition(
                loop.epoch_progress.current.processed - 1, loop.epoch_loop.batch_progress.current.ready
            )
        return EpochPosition(*compat.training_position(self._trainer))

    @contextmanager
    def at(self, where: Where) -> Iterator[None]:
        """The state is complete inside the block."""
        before, self.where = self.where, where
        try:
            yield
        finally:
            self.where = before

    def before_epoch(self, trainer: L.Trainer) -> None:
        """Nothing of the next epoch has begun; its hooks come after this.  Also where a fit resumes inside one."""
        self._users.begun()
        if self._state is not None and compat.training_position(trainer)[1] == 0:
            self._restore(trainer)
            compat.as_if_never_restored(trainer)

    def going_on(self, trainer: L.Trainer) -> bool | None:
        """A fit resumes inside an epoch: whether the end of its last batch is due (a validation, plateau schedules).

        None where the checkpoint does not say: Lightning finds its position itself.
        """
        if self._state is None:
            return None
        due: bool = self._state["where"] == "batch"
        self._restore(trainer)
        return due

    def requesting_training(
        self, trainer: L.Trainer, *, rebuilt: bool
    ) -> AbstractContextManager[tuple[int, int] | None]:
        """The training's loaders are requested inside the block; `rebuilt`: for a later epoch."""
        assert self.loaders is not None
        self.loaders.rebuilt(anew=rebuilt)
        before = self._state if self._state is not None else {}
        return self._requests.training(trainer, self._users.attributes, before, same_ranks=self._same_ranks)

    def requesting_validation(self, trainer: L.Trainer) -> AbstractContextManager[None] | None:
        """The validation's loaders are requested inside the block; None: not yet, as in the fit that is resumed."""
        if self.loaders is None or (self._requests.later and self._state is not None):
            return None
        self.loaders.validation_requested()
        return self._requests.validation(trainer)

    def hold(self, trainer: L.Trainer) -> None:
        """A validation is next: a stop in the middle of it saves the state before it."""
        self._validating = apply_to_collection(self.capture(trainer), torch.Tensor, torch.clone)

    def in_window(self, trainer: L.Trainer) -> bool:
        """Whether the last batch ended without an optimizer step: its gradients wait for those of the next.

        Where the module steps its optimizers by itself, these gradients are part of each checkpoint.
        """
        return trainer.lightning_module.automatic_optimization and trainer.global_step == self._step

    def after_validation(self) -> None:
        """Everything that belongs to a batch is done."""
        self.where, self._validating = "done", None

    def capture(self, trainer: L.Trainer) -> dict[str, Any]:
        """This rank's part of a checkpoint."""
        if self._validating is not None and self.where is None:
            return self._validating
        assert self.loaders is not None
        users, loaders = self._users.state(), self.loaders.state()
        self._record_reasons(trainer)
        return {
            **rank_state.capture(trainer),
            **users,
            "where": self.where,
            "loaders": loaders,
            **self._requests.state(self._users.attributes),
            LOGGER_POSITIONS: logger_positions(trainer.loggers) if trainer.is_global_zero else {},
        }

    def _restore(self, trainer: L.Trainer) -> None:
        state, self._state = self._state, None
        assert state is not None
        if self._same_ranks and state["where"] in ("batch", "done"):
            compat.resume_averaging(trainer)  # it notes what the trainer has before it changes that
        self._users.restore(state, same_ranks=self._same_ranks)
        if not self._same_ranks:
            assert self.loaders is not None
            seed_anew(self.loaders.seed, trainer.global_step, rank_state.data_rank(trainer))
        elif state["where"] is not None:
            rank_state.restore(trainer, state)
            self._restored(state)

    def _common_seed(self, saved: Mapping[str, Any] | None) -> int:
        if saved is not None:
            return int(saved["seed"])
        seed = self._environ.get(_SEED) if self.seed is None else self.seed
        return int(broadcast_object(seed if seed is not None else torch.initial_seed()))

    def uninstall(self) -> None:
        """Leaves the trainer as it was."""
        for undo in self._undo:
            undo()
        self._undo = []


def _nothing(_: object) -> None:
    """Does nothing."""


def state_reasons(trainer: L.Trainer) -> list[Inexact]:
    """What of the model, its hooks and the callbacks keeps a state that no checkpoint has."""
    reasons = []
    if is_param_in_hook_signature(trainer.lightning_module.training_step, "dataloader_iter", explicit=True):
        reasons.append(
            Inexact(
                "training_step(self, dataloader_iter)",
                why="the step takes its batches itself, and they are not counted",
                fix="take batch and batch_idx",
            )
        )
    if any(map(compat.resets_weights, vars(trainer)["callbacks"])):
        reasons.append(
            Inexact(
                "ModelPruning(use_lottery_ticket_hypothesis=True)",
                why="the weights that it goes back to are in no checkpoint",
                fix="use_lottery_ticket_hypothesis=False",
            )
        )
    return reasons


def script_reasons(trainer: L.Trainer, *, seeded: bool, in_order: bool) -> Iterator[Inexact]:
    """What a script's own Trainer has decided: nothing but the object says it."""
    if not seeded:
        yield unseeded("lightning.pytorch.seed_everything(1, workers=True)")
    device = trainer.strategy.root_device.type
    if device == "cuda":
        yield from kernel_reasons(lambda name, value: f"Trainer({name}={value!r})")
    elif device != "cpu":
        yield Inexact(
            f"the device {device}",
            why="no test has shown that it computes the same bits twice",
            fix="a CPU or CUDA",
            certain=False,
        )
    strategy = trainer.strategy
    if not in_order:
        yield Inexact(
            f"DistributedDataParallel with {trainer.world_size} ranks",
            why="a resumed run adds the gradients of its first step in another order",
            fix="DDPStrategy(find_unused_parameters=True), or fairlead.Trainer with exact_reduction: on",
        )
    if not isinstance(strategy, (DDPStrategy, SingleDeviceStrategy)):
        yield Inexact(
            f"the strategy {type(strategy).__name__}",
            why="it was not tried in a script",
            fix="fairlead.Trainer",
            certain=False,
        )
    settings: Any = trainer  # Lightning sets these without a declaration
    # Lightning keeps no duration as `val_check_interval`, and makes a Timer of `max_time`.
    by_the_clock = not isinstance(getattr(trainer, "val_check_interval", None), (int, float))
    found = {
        "val_check_interval": by_the_clock,
        "max_time": any(isinstance(callback, Timer) for callback in settings.callbacks),
        "overfit_batches": settings.overfit_batches,
    }
    marks = marked(TrainerConfig, NotExact)
    for mark, name in ((marks[name], name) for name, is_so in found.items() if is_so):
        yield Inexact(f"Trainer({name}=...)", why=mark.why, fix=mark.fix, certain=mark.certain)


def uncut_loggers(loggers: Sequence[Logger]) -> list[str]:
    """Loggers that hold a step twice when it is repeated: they cannot be cut back."""
    return sorted({type(logger).__name__ for logger in loggers if not isinstance(logger, Positioned)})
