"""The result of a check. `CODES` has the core's codes for the documentation; a plugin has its own in `Plugin.codes`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Final, Literal

from fairlead.errors import ConfigError, FairleadError
from fairlead.facts import Setting

__all__ = ["CODES", "CheckResult", "Finding", "Inexact", "Severity", "errors_in", "raise_errors"]

Severity = Literal["error", "warning", "info"]

CODES: Final[dict[str, str]] = {
    "accelerator-unavailable": "The requested accelerator is not on this machine.",
    "allocation-unused": "The scheduler gave this job more nodes or tasks than the run will use.",
    "argument-missing": "A required argument of a user's class is not given.",
    "argument-unknown": "An argument that a user's class does not take.",
    "axis-set-twice": "One axis is set twice, as in `precision` and in `plugins`.",
    "batch-policy": "The world size changed on resume and `trainer.batch_policy` does not say what stays constant.",
    "capability": "Two choices do not work together; the capability table gives the reason.",
    "checkpoint-interval": "The run saves far too seldom, or too often, for how often it fails.",
    "class-not-callable": "A `class:` names something that cannot be called.",
    "class-not-found": "A module exists, but has no such class or function.",
    "class-syntax": "A module of the user's does not parse.",
    "class-unchecked": "The arguments of a user's class cannot be checked without importing it.",
    "code-changed": "The user's code changed since this run was started.",
    "communication-wait": "A large share of each step waits for gradients of other ranks.",
    "data-wait": "A large share of each step waits for the loader.",
    "devices-count": "The job requests more devices, or other indices, than there are.",
    "engine-mismatch": "Two engines are installed in versions that do not work together.",
    "engine-too-old": "A feature needs a newer version of an engine than the one that is installed.",
    "engine-untested": "An engine is newer or older than the versions that Fairlead was tested with; the run starts.",
    "environment-malformed": "A variable that the launcher promises is absent or malformed.",
    "environment-tie": "Two environments claim this process with equal right.",
    "environment-unclaimed": "The environment was named in the config, but nothing on this machine shows it.",
    "gradient-not-finite": "A gradient of a training step is infinite or NaN, although the loss is finite.",
    "hang": "Ranks of a run wait for others that do not get on.",
    "interval-never-comes": "A callback's, a validation's or a schedule's interval is longer than the training.",
    "launch-mismatch": "The launcher started another number of processes or nodes than the config asks for.",
    "logging-slow": "Callbacks, loggers and the loop's own code take a large share of each step.",
    "loss-not-finite": "The loss of a training step is infinite or NaN.",
    "world-size-contradicted": "WORLD_SIZE is exported, and the run has another number of ranks.",
    "metric-differs": "A callback or a schedule decides on each rank by a metric that differs over the ranks.",
    "missing-field": "A required setting is not given.",
    "module-not-found": "A module that a `class:` names was not found.",
    "monitor-not-logged": "A callback or a schedule monitors a metric that is not logged.",
    "name-invalid": "`run.name` names a setting that the job does not have, or gives no usable folder name.",
    "network-setting-overridden": "The environment sets a variable of NCCL or gloo to another value than the config.",
    "network-setting-unused": "Settings of NCCL are given, but another backend carries the messages.",
    "no-optimizer-step": "No optimizer of the model's parameters has stepped in an epoch.",
    "oversubscribed": "More ranks on a node than it has processor cores.",
    "plugin-broken": "The selected plugin is installed but cannot be loaded.",
    "plugin-missing": "The selected plugin, or its engine, is not installed.",
    "precision-emulated": "This hardware has no native bfloat16; it would be emulated, slowly.",
    "profile-missing": "`check --for` needs `resources` in the job.",
    "profile-mismatch": "The job requests more than its `resources` have.",
    "replicas-differ": "Ranks that should hold the same weights, buffers and optimizer state do not.",
    "resume-exactness-unknown": "Whether a resumed run ends with the same bits is not known, as before a first start.",
    "resume-not-exact": "A resumed run may end with other bits than one that was not interrupted.",
    "resume-path": "The checkpoint to resume from does not exist.",
    "run-directory": "The run directory cannot be used as it is.",
    "run-finished": "The run has reached its limits; there is nothing left to do.",
    "same-samples": "Ranks, or workers of the loader, train on the same samples.",
    "settings-changed": "A run resumes from a checkpoint that was saved with other settings.",
    "signal-handler-replaced": "A library replaced a signal handler after the handlers for stops were installed.",
    "signals-unheard": "The training is not in the main thread, and no installed signal handlers were passed to it.",
    "slow-rank": "The other ranks wait in each step for one that computes longer.",
    "steps-uncounted": "The module steps an optimizer where Lightning does not count it; Fairlead counts these steps.",
    "uneven-inputs": "Some ranks have more training batches than others; all end an epoch with the shortest.",
    "unknown-field": "A setting that does not exist.",
    "unknown-tag": "A plugin name that no installed or known plugin has.",
    "variable-missing": "A job reads an environment variable that is not set, and gives no default.",
    "wrong-type": "A value of the wrong type.",
    "wrong-value": "A value that is not allowed.",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check.

    Args:
        severity: `error` stops a run before it starts; `warning` and `info` do not.
        code: Its name in the documentation, such as `unknown-tag`.
        what: What is the matter, one sentence.
        where: The location: `trainer.strategy` or `job.yaml:7, trainer.strategy`.
        why: The reason or the evidence.
        fix: What to do.

    Example:
        >>> print(Finding("error", "devices-count", "9 devices were requested, 1 is there", where="trainer.devices"))
        error[devices-count]: 9 devices were requested, 1 is there
          where: trainer.devices
    """

    severity: Severity
    code: str
    what: str
    _: KW_ONLY
    where: str | None = None
    why: str | None = None
    fix: str | None = None

    def __str__(self) -> str:
        return f"{self.severity}[{self.code}]: {self.as_error().block()}"

    def as_dict(self) -> dict[str, str | None]:
        """The finding as `check --json` prints it."""
        names = ("severity", "code", "where", "what", "why", "fix")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def of(cls, error: FairleadError, severity: Severity, code: str, *, where: str | None = None) -> Finding:
        """An error as a finding; its own location counts where no other is given."""
        return cls(severity, code, error.what, where=where or error.where, why=error.why, fix=error.fix)

    def as_error(self) -> ConfigError:
        """The finding as the error that a command would end with."""
        return ConfigError(self.what, where=self.where, why=self.why, fix=self.fix)


@dataclass(frozen=True, slots=True)
class Inexact:
    """One thing that keeps a resumed run from ending with the same bits, or may: then it is not `certain`.

    `what` names it with its location, as `the IterableDataset Stream in data.py:12`; `fix` is what to change.
    """

    what: str
    _: KW_ONLY
    why: str
    fix: str
    certain: bool = True


@dataclass(frozen=True)
class CheckResult:
    """What a check of every job found.

    Args:
        findings: What is wrong, or worth knowing.
        settings: What the check knows about the start, by name, for `explain`: `{"run_dir": Setting(...)}`.

    Example:
        >>> CheckResult((Finding("warning", "quota", "the project has no GPU hours left"),)).settings
        {}
    """

    findings: tuple[Finding, ...] = ()
    settings: Mapping[str, Setting] = field(default_factory=dict)


def errors_in(findings: Iterable[Finding]) -> list[Finding]:
    """Those findings that stop a run."""
    return [finding for finding in findings if finding.severity == "error"]


def raise_errors(findings: Iterable[Finding]) -> None:
    """Raises the errors among the findings as one `ConfigError`; returns when there are none."""
    errors = errors_in(findings)
    if not errors:
        return
    if len(errors) == 1:
        raise errors[0].as_error()
    raise ConfigError(f"{len(errors)} things are wrong", why="\n".join(str(finding) for finding in errors))
