"""Stop on a signal in any training loop: all ranks at the same step, everything saved, and the job restarted."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from fairlead.config_bases import RequeueConfigBase
from fairlead.errors import ConfigError
from fairlead.facts import StopReason
from fairlead.interfaces import BuildContext, Requeuer
from fairlead_hpc_signals.agreement import LocalAgreement, StopAgreement
from fairlead_hpc_signals.deadline import Deadline, Question
from fairlead_hpc_signals.decision import AgreementError, StopDecision
from fairlead_hpc_signals.flags import DEFAULT_SIGNALS, SignalFlags
from fairlead_hpc_signals.outcomes import StopOutcome, StopPolicy, to_stderr
from fairlead_hpc_signals.scheduler import requeuer_here, why_stopped
from fairlead_hpc_signals.shutdown import Shutdown
from fairlead_hpc_signals.switches import SwitchFiles
from fairlead_hpc_signals.watch import StopWatch
from fairlead_hpc_signals.workers import OutliveStops
from fairlead_runs.guard import Overdue

if TYPE_CHECKING:
    import torch.distributed as dist

SIGNAL_VARIABLES: Final = ("NSHRUNNER_SUBMIT_TIMEOUT_SIGNAL", "NSHRUNNER_SUBMIT_PREEMPT_SIGNAL")
"""Variables of the job runner nshrunner that name the signals it has the scheduler send."""
_HEARD_S: Final = 2.0  # how long living ranks may take to hear of a stop, where another one is gone
_ALWAYS: Final = ("SIGTERM", "SIGINT")  # what schedulers send at the end, and Ctrl-C


class PreemptionGuard:
    """Notices that the job is to stop, and stops it with nothing lost.

    Args:
        signals: Those that ask for a stop.
        policy: What to do then; None is the default one.
        environ: The environment of the job; None is this process's own.
        flags: Handlers that the main thread has installed, instead of own ones for `signals`.

    Raises:
        ConfigError: This is not the main thread (make `flags` there, and pass them), or a signal does not exist.

    Example:
        >>> with PreemptionGuard() as guard:                            # doctest: +SKIP
        ...     torch.distributed.init_process_group()
        ...     for batch in loader:
        ...         train_step(batch)
        ...         if guard.should_stop():  # the same answer on all ranks
        ...             guard.save_and_requeue(save, requeuer).exit()
    """

    def __init__(
        self,
        signals: Iterable[str | int] = DEFAULT_SIGNALS,
        *,
        policy: StopPolicy | None = None,
        environ: Mapping[str, str] | None = None,
        flags: SignalFlags | None = None,
    ) -> None:
        self.policy = policy or StopPolicy()
        self.flags = SignalFlags(signals).install() if flags is None else flags
        """The signals that came to this process."""
        self.outcome: StopOutcome | None = None
        """How the stop ended, after `save_and_requeue`."""
        self._own_flags = flags is None
        self._environ = os.environ if environ is None else environ
        self._agreement: LocalAgreement | StopAgreement | None = None
        self._boundary = 0
        self._save_due = False
        self._switches: SwitchFiles | None = None
        self._deadline = Deadline(self.flags, self._environ, self.policy)
        self._question = Question(self._why, self._deadline, self.policy)
        self._watch: StopWatch | None = None
        self._overdue = Overdue(lambda: requeuer_here(self._environ))

    # -- in the loop

    def watch_opening(self, at: str = "starting") -> None:
        """Until `start`, which is called when the run is open: has a stop end this process a minute after its signal.

        Nothing is trained by then, so nothing is lost. Call it on rank 0 alone; the others end with it.
        """
        if self._agreement is None and self._watch is None:
            overdue = Overdue(lambda: requeuer_here(self._environ), progress=lambda: None, answers=False, at=lambda: at)
            agreement = LocalAgreement(self.flags)
            self._watch = StopWatch(self.flags, agreement, self._deadline, self._question, self.policy, overdue)

    def start(self, store: dist.Store | None = None, rank: int = 0, world_size: int = 1) -> PreemptionGuard:
        """Joins the other ranks, which all do so; the first `should_stop` does it otherwise.

        Args:
            store: A store that all ranks share, under its own prefix. None takes torch's default process group,
                and without one this is a single process.
            rank: This rank, where a store is given.
            world_size: The number of ranks, where a store is given.
        """
        if self._agreement is not None:
            return self
        if self._watch is not None:
            self._watch.close()  # that of the opening
        dist = sys.modules.get("torch.distributed")  # never imported for a program without torch
        options: dict[str, Any] = {"deadline": self._deadline, "woken": self._wake}
        if store is not None and world_size > 1:
            self._agreement = StopAgreement(self.flags, store, rank, world_size, **options)
        elif dist is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._agreement = StopAgreement.of_process_group(self.flags, **options)
        else:
            self._agreement = LocalAgreement(self.flags)
        self._watch = StopWatch(self.flags, self._agreement, self._deadline, self._question, self.policy, self._overdue)
        self._start_switches()
        return self

    def watch_switches(self, run: Path, record: Callable[..., object] | None = None) -> None:
        """Has rank 0 look for the switch files `SAVE` and `STOP` in a run directory; call it on all ranks.

        `STOP` makes `should_stop` true, and no other start is wanted; `SAVE` makes `should_save` true once. `record`
        writes an event into the run's history, called with a name, and what there is to say by keyword.
        """
        self._switches = SwitchFiles(run, record)
        self._start_switches()

    def when_overdue(self, overdue: Overdue) -> None:
        """What to do when a stop is not carried out in time; before this is called `requeuer_here()` requeues.

        This process is then ended where it is, from a thread, with the exit code of a stop; so is one whose main
        thread does not hear a second Ctrl-C, or (in no scheduler's job) that gets a second SIGTERM.
        """
        self._overdue = overdue
        if self._watch is not None:
            self._watch.overdue = overdue

    def lost(self, error: BaseException) -> bool:
        """Whether an error says no more than that another rank went away during a stop.

        Then that rank is gone, and the stop is carried out without it: see `ended_by`. One that was gone before has
        failed: the SIGTERM by which srun or torchrun then ends the others asks for no stop.
        """
        if self._agreement is None or not self._agreement.requested or self.outcome is not None:
            return False
        if isinstance(error, AgreementError):
            return bool(error.missing)
        if not isinstance(self._agreement, StopAgreement):
            return False
        from fairlead_launch.reports import lost_a_peer  # with several ranks it is there

        return lost_a_peer(error) and self._agreement.all_heard(_HEARD_S)

    def ended_by(self, error: BaseException) -> NoReturn:
        """Ends this process after an error for which `lost` is true, as `when_overdue` says."""
        assert self._watch is not None
        if isinstance(error, AgreementError):
            self._watch.end(error.short, error.missing)
        self._watch.end(f"another rank went away: {str(error).strip().splitlines()[-1]}")

    def should_stop(self) -> bool:
        """Whether to stop here; call it between two steps, on all ranks equally often, after the process group.

        Not in an evaluation of which ranks have different numbers of batches.

        Where a stop was requested, and not all ranks answer in time, this process ends here: see `when_overdue`.
        """
        self._boundary += 1
        try:
            agreed = self._started().boundary(self._boundary)
        except AgreementError as error:
            if not self.lost(error):
                raise
            self.ended_by(error)
        self._save_due = agreed == "save"
        if agreed == "stop" and self._watch is not None:
            self._watch.phase = "saving"
        return agreed == "stop"

    def should_save(self) -> bool:
        """Whether a checkpoint was requested by the file `SAVE` of a run; call it after each `should_stop`.

        True once for each request, on all ranks at the same step.
        """
        due, self._save_due = self._save_due, False
        return due

    def ask(self, why: str, *, final: bool = False) -> None:
        """Asks all ranks to stop without a signal, as before the end of a time budget; `why` is for the history.

        `final`: no other start is wanted.
        """
        self._started().ask(why, final=final)
        self._wake()

    @property
    def in_worker(self) -> OutliveStops:
        """For `worker_init_fn` of loaders: a scheduler signals their workers too, which must outlive it."""
        return OutliveStops(self.flags.signals)

    # -- afterwards

    @property
    def decision(self) -> StopDecision | None:
        """Where all stop, and the requests; None before that."""
        return None if self._agreement is None else self._agreement.decision

    def save_and_requeue(
        self,
        save: Callable[[], object],
        requeuer: Requeuer | None = None,
        *,
        durable: Callable[[], object] | None = None,
        finish: Callable[[StopReason], object] | None = None,
        budget: Callable[[StopReason], str | None] | None = None,
        tell: Callable[[StopOutcome], object] | None = None,
    ) -> StopOutcome:
        """Saves on all ranks, then has the job restarted by rank 0; called on all ranks once they agreed to stop.

        Meanwhile rank 0 asks the scheduler why, and waits for an answer no longer than there is time. No start is
        arranged before everything is saved, for a cancelled job, or for one that is requeued already. Where the disk
        refuses, or another rank does not answer, the checkpoint before counts: see `StopOutcome.unsaved`.

        Args:
            save: Writes the checkpoint.
            requeuer: Has the job restarted; None leaves it to who started it, by the exit code.
            durable: Returns when what was saved survives a power cut.
            finish: Closes loggers and writes the history, before the job is requeued: the scheduler may end it at once.
                Left out when the time left is known to be short.
            budget: Says why no other start is wanted after a reason, or None where one is; called on rank 0. Whoever
                keeps the history of a run keeps count of its starts.
            tell: Tells the user how it ended, on rank 0; None prints a line.

        Returns:
            What was done, and the exit code for all ranks: end the process with it (`outcome.exit()`).

        Raises:
            ConfigError: No stop was agreed on, or this was called before.
            RunFailedError: The code of another rank's `save` failed. Nothing was requeued.
            Exception: What `save` or `durable` raised on this rank, unless it was of a disk or a lost rank (`OSError`,
                `RuntimeError`, an error of Fairlead).
        """
        agreement = self._agreement
        if agreement is None or agreement.decision is None:
            raise ConfigError("no stop was agreed on", fix="call save_and_requeue where should_stop() was true")
        if self.outcome is not None:
            raise ConfigError("this stop was carried out already", fix="end the process with outcome.exit_code")
        watch = self._watch
        assert watch is not None  # there is an agreement
        signals, final = agreement.decision.signals, agreement.decision.final
        shutdown = Shutdown(agreement.mailbox, self.policy, signals, self._question, self._deadline, budget, final)
        error: BaseException | None = None
        try:
            try:
                save()
                if durable is not None:
                    durable()
            except BaseException as raised:  # the others must learn of it, whatever it is
                error = raised
            plan = shutdown.plan(error, getattr(requeuer, "exit_code", None))
            if plan is None:
                watch.end("rank 0 did not say in time that all was saved", (0,))
            shutdown.finish(plan, finish)
            watch.phase = "requeue"
            self.outcome = shutdown.requeue(plan, requeuer)
            if self._switches is not None and shutdown.leads:
                self._switches.carried_out(self.outcome)
        finally:
            watch.close()
        if shutdown.leads:
            if self.outcome.error is not None:
                warnings.warn(self.outcome.error, stacklevel=2)
            (tell or _tell)(self.outcome)
        return self.outcome

    def close(self, *, failed: bool = False) -> None:
        """Ends what runs in the background and puts the earlier handlers back; `failed`: an error has left the loop.

        After a stop the handlers stay: a requeue ends the job with signals, and the exit code must be the agreed one.
        """
        if self._switches is not None:
            self._switches.close()
        if self._watch is not None:
            self._watch.close()
        if self._agreement is not None:
            self._agreement.close(failed=failed)
        if self._own_flags and self.outcome is None:
            self.flags.uninstall()

    def __enter__(self) -> PreemptionGuard:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None and self.lost(error):
            self.ended_by(error)
        self.close(failed=isinstance(error, Exception))

    def _started(self) -> LocalAgreement | StopAgreement:
        self.start()
        assert self._agreement is not None
        return self._agreement

    def _start_switches(self) -> None:
        if self._switches is not None and self._agreement is not None and self._watch is not None:
            self._watch.carried_out = self._switches.carried_out
            self._switches.start(self._agreement, self.ask)

    def _wake(self) -> None:
        if self._watch is not None:
            self._watch.wake()

    def _why(self, timeout_s: float) -> StopReason:
        return why_stopped(self._environ, timeout_s=timeout_s, limit_window_s=self.policy.limit_window_s)


def _tell(outcome: StopOutcome) -> None:
    to_stderr(outcome.summary())


def build(config: RequeueConfigBase, context: BuildContext, flags: SignalFlags | None = None) -> PreemptionGuard:
    """The guard of one run; `flags` are those of an earlier guard of this process, None: new ones, to be installed."""
    policy = StopPolicy(
        auto_requeue=config.name != "none",
        final_code=getattr(config, "final_code", None),
        requeue_unknown=config.when_unknown == "requeue",
        limit_window_s=config.limit_window_s,
        short_s=config.short_s,
        grace_s=config.grace_s,
    )
    flags = flags if flags is not None else SignalFlags(stop_signals(config, context.environ))
    return PreemptionGuard(policy=policy, environ=context.environ, flags=flags)


def stop_signals(config: RequeueConfigBase, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The signals that ask for a stop: those of the config, else the usual ones and those of nshrunner."""
    if config.signals is not None:
        return tuple(dict.fromkeys((*config.signals, *_ALWAYS)))
    named = (environ[name] for name in SIGNAL_VARIABLES if environ.get(name))
    return tuple(dict.fromkeys((*DEFAULT_SIGNALS, *named)))
