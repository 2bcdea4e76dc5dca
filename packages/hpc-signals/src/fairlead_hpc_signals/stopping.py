"""Stop on a signal in any training loop: all ranks at the same step, everything saved, and the job started again."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final

from fairlead.config_bases import RequeueConfigBase
from fairlead.errors import ConfigError
from fairlead.facts import StopReason
from fairlead.interfaces import BuildContext, Requeuer
from fairlead_hpc_signals.agreement import LocalAgreement, StopAgreement
from fairlead_hpc_signals.decision import StopDecision
from fairlead_hpc_signals.flags import DEFAULT_SIGNALS, SignalFlags
from fairlead_hpc_signals.outcomes import StopOutcome, StopPolicy
from fairlead_hpc_signals.scheduler import why_stopped
from fairlead_hpc_signals.shutdown import Shutdown
from fairlead_hpc_signals.workers import OutliveStops

if TYPE_CHECKING:
    import torch.distributed as dist

SIGNAL_VARIABLES: Final = ("NSHRUNNER_SUBMIT_TIMEOUT_SIGNAL", "NSHRUNNER_SUBMIT_PREEMPT_SIGNAL")
"""Variables of the job runner nshrunner that name the signals it has the scheduler send."""
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

    # -- in the loop

    def start(self, store: dist.Store | None = None, rank: int = 0, world_size: int = 1) -> PreemptionGuard:
        """Joins the other ranks, which all do so; the first `should_stop` does it otherwise.

        Args:
            store: A store that all ranks share, under a prefix of its own. None takes torch's default process group,
                and without one this is a single process.
            rank: This rank, where a store is given.
            world_size: The number of ranks, where a store is given.
        """
        if self._agreement is not None:
            return self
        dist = sys.modules.get("torch.distributed")  # never imported for a program without torch
        if store is not None and world_size > 1:
            self._agreement = StopAgreement(self.flags, store, rank, world_size)
        elif dist is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._agreement = StopAgreement.of_process_group(self.flags)
        else:
            self._agreement = LocalAgreement(self.flags)
        return self

    def should_stop(self) -> bool:
        """Whether to stop here; call it between two steps, on all ranks equally often, after the process group.

        Not in an evaluation of which ranks have different numbers of batches.

        Raises:
            AgreementError: A stop was asked for, and not all ranks answered in time.
        """
        self._boundary += 1
        return self._started().boundary(self._boundary)

    def ask(self, why: str) -> None:
        """Asks all ranks to stop without a signal, as before the end of a time budget; `why` is for the history."""
        self._started().ask(why)

    @property
    def in_worker(self) -> OutliveStops:
        """For `worker_init_fn` of loaders: a scheduler signals their workers too, which must outlive it."""
        return OutliveStops(self.flags.signals)

    # -- afterwards

    @property
    def decision(self) -> StopDecision | None:
        """Where all stop and who was asked by what; None before that."""
        return None if self._agreement is None else self._agreement.decision

    def save_and_requeue(
        self,
        save: Callable[[], object],
        requeuer: Requeuer | None = None,
        *,
        durable: Callable[[], object] | None = None,
        finish: Callable[[StopReason], object] | None = None,
        budget: Callable[[StopReason], str | None] | None = None,
    ) -> StopOutcome:
        """Saves on all ranks, then has the job started again by rank 0; called on all ranks once they agreed to stop.

        Meanwhile rank 0 asks the scheduler why. No start is arranged before everything is saved, for a cancelled job,
        or for one that is requeued already.

        Args:
            save: Writes the checkpoint.
            requeuer: Has the job started again; None leaves it to who started it, by the exit code.
            durable: Returns when what was saved survives a power cut.
            finish: Closes loggers and writes the history, before the job is requeued: the scheduler may end it at once.
                Left out when the time left is known to be short.
            budget: Says why no other start is wanted after a reason, or None where one is; called on rank 0. Whoever
                keeps the history of a run keeps count of its starts.

        Returns:
            What was done, and the exit code for all ranks: end the process with it (`outcome.exit()`).

        Raises:
            ConfigError: No stop was agreed on, or this was called before.
            RunFailedError: Another rank could not save. Nothing was requeued.
            Exception: Whatever `save` or `durable` raised on this rank.
        """
        agreement = self._agreement
        if agreement is None or agreement.decision is None:
            raise ConfigError("no stop was agreed on", fix="call save_and_requeue where should_stop() was true")
        if self.outcome is not None:
            raise ConfigError("this stop was carried out already", fix="end the process with outcome.exit_code")
        shutdown = Shutdown(agreement.mailbox, self.policy, agreement.decision.signals, self._why, budget)
        error: BaseException | None = None
        try:
            save()
            if durable is not None:
                durable()
        except BaseException as raised:  # the others must learn of it, whatever it is
            error = raised
        plan = shutdown.plan(error, getattr(requeuer, "exit_code", None))
        shutdown.finish(plan, finish)
        self.outcome = shutdown.requeue(plan, requeuer)
        if self.outcome.error is not None and shutdown.leads:
            warnings.warn(self.outcome.error, stacklevel=2)
        return self.outcome

    def close(self) -> None:
        """Ends what runs in the background and puts the earlier handlers back.

        After a stop the handlers stay: a requeue ends the job with signals, and the exit code must be the agreed one.
        """
        if self._agreement is not None:
            self._agreement.close()
        if self._own_flags and self.outcome is None:
            self.flags.uninstall()

    def __enter__(self) -> PreemptionGuard:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _started(self) -> LocalAgreement | StopAgreement:
        self.start()
        assert self._agreement is not None
        return self._agreement

    def _why(self) -> StopReason:
        policy = self.policy
        return why_stopped(self._environ, timeout_s=policy.ask_timeout_s, limit_window_s=policy.limit_window_s)


def build(config: RequeueConfigBase, context: BuildContext, flags: SignalFlags | None = None) -> PreemptionGuard:
    """The guard of one run; `flags` are those of an earlier guard of this process, None: new ones, to be installed."""
    policy = StopPolicy(
        auto_requeue=config.name != "none",
        final_code=getattr(config, "final_code", None),
        requeue_unknown=config.when_unknown == "requeue",
        limit_window_s=config.limit_window_s,
        short_s=config.short_s,
    )
    flags = flags if flags is not None else SignalFlags(stop_signals(config, context.environ))
    return PreemptionGuard(policy=policy, environ=context.environ, flags=flags)


def stop_signals(config: RequeueConfigBase, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The signals that ask for a stop: those of the config, else the usual ones and those of nshrunner."""
    if config.signals is not None:
        return tuple(dict.fromkeys((*config.signals, *_ALWAYS)))
    named = (environ[name] for name in SIGNAL_VARIABLES if environ.get(name))
    return tuple(dict.fromkeys((*DEFAULT_SIGNALS, *named)))
