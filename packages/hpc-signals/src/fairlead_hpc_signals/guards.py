"""What the requeue plugins give a run: a `PreemptionGuard` with the signals and the policy of a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fairlead.bases import RequeueConfigBase
from fairlead.interfaces import BuildContext
from fairlead_hpc_signals.flags import DEFAULT_SIGNALS, SignalFlags
from fairlead_hpc_signals.outcomes import StopPolicy
from fairlead_hpc_signals.stopping import PreemptionGuard

__all__ = ["SIGNAL_VARIABLES", "build", "stop_signals"]

SIGNAL_VARIABLES: Final = ("NSHRUNNER_SUBMIT_TIMEOUT_SIGNAL", "NSHRUNNER_SUBMIT_PREEMPT_SIGNAL")
"""Variables of the job runner nshrunner that name the signals it has the scheduler send."""
_ALWAYS: Final = ("SIGTERM", "SIGINT")  # what schedulers send at the end, and Ctrl-C


def build(config: RequeueConfigBase, context: BuildContext, flags: SignalFlags | None = None) -> PreemptionGuard:
    """The guard of one run; its handlers are installed by `guard.flags.install()`.

    Args:
        config: The requeuer's.
        context: Of it, the environment is used.
        flags: Those of an earlier guard of this process; None: new ones.
    """
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
    """The signals that ask for a stop: those of the config, else the usual ones and those of nshrunner.

    Example:
        >>> from fairlead_hpc_signals import SLURMRequeueConfig
        >>> stop_signals(SLURMRequeueConfig(signals=["usr2"]), {})
        ('SIGUSR2', 'SIGTERM', 'SIGINT')
    """
    if config.signals is not None:
        return tuple(dict.fromkeys((*config.signals, *_ALWAYS)))
    named = (environ[name] for name in SIGNAL_VARIABLES if environ.get(name))
    return tuple(dict.fromkeys((*DEFAULT_SIGNALS, *named)))
