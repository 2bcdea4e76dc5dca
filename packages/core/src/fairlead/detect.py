"""Which environment started this process: all claims are collected, the most specific one wins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

from fairlead.config_bases import EnvironmentConfigBase
from fairlead.errors import FairleadError
from fairlead.facts import Claim, Job, Setting, Specificity, Topology
from fairlead.findings import Finding
from fairlead.hooks import answer
from fairlead.open_union import parse_backend
from fairlead.plugins import PluginManager

VARIABLE = "FAIRLEAD_ENVIRONMENT"
"""Names the environment when neither the config nor detection should decide."""

FALLBACK = "lightning"
"""The environment of one machine, where nothing says otherwise."""

A = TypeVar("A")


@dataclass(frozen=True)
class ChosenEnvironment:
    """The environment of this process; None is a plugin that cannot be used, or a topology before run time.

    `claims` are by tag, the most specific first; `job` is the scheduler's, whatever the environment is.
    """

    config: EnvironmentConfigBase | None
    setting: Setting
    claims: Mapping[str, Claim]
    topology: Topology | None
    job: Job | None
    findings: tuple[Finding, ...]

    @property
    def inside_job(self) -> bool:
        """Whether a scheduler or launcher started this process."""
        return any(claim.specificity >= Specificity.SCHEDULER for claim in self.claims.values())


def _claims(
    environ: Mapping[str, str], plugins: PluginManager, findings: list[Finding] | None = None
) -> dict[str, Claim]:
    """The claims of all installed environments, most specific first."""
    claims = _answers("fairlead_detect", Claim, environ, plugins, findings)
    return dict(sorted(claims.items(), key=lambda item: (-item[1].specificity, item[0])))


def find_job(
    environ: Mapping[str, str],
    plugins: PluginManager,
    *,
    claims: Mapping[str, Claim] | None = None,
    findings: list[Finding] | None = None,
) -> Job | None:
    """The scheduler's job that this process is in, as any installed environment knows it.

    Where several know one, that of the most specific claim counts; an environment that claims nothing here, such as
    SLURM's inside `torchrun`, counts as a scheduler.
    """
    jobs = _answers("fairlead_job", Job, environ, plugins, findings)
    if not jobs:
        return None
    known = _claims(environ, plugins) if claims is None else claims
    rank = {tag: known[tag].specificity if tag in known else Specificity.SCHEDULER for tag in jobs}
    return jobs[min(jobs, key=lambda tag: (-rank[tag], tag))]


def _answers(
    hook: str, kind: type[A], environ: Mapping[str, str], plugins: PluginManager, findings: list[Finding] | None
) -> dict[str, A]:
    """What a hook of each installed environment returns, without None.

    A plugin that fails to answer is passed over, with a warning in `findings`: it may be one that nobody uses.
    """
    found: dict[str, A] = {}
    for name, plugin in plugins.distinct("environment").items():
        try:
            if (one := answer(plugins, plugin, hook, kind, environ=environ)) is not None:
                found[name] = one
        except FairleadError as error:
            if findings is not None:
                where = f"the plugin environment.{name}"
                findings.append(Finding.of(error, "warning", "plugin-broken", where=where))
    return found


def choose_environment(
    asked: EnvironmentConfigBase | str, environ: Mapping[str, str], plugins: PluginManager, *, starting: bool = False
) -> ChosenEnvironment:
    """Chooses by the config, then by FAIRLEAD_ENVIRONMENT, then by the claims.

    Unless the job is `starting`, this may be a login node, which need not look like a rank.
    """
    findings: list[Finding] = []
    claims = _claims(environ, plugins, findings)
    job = find_job(environ, plugins, claims=claims, findings=findings)
    if isinstance(asked, EnvironmentConfigBase):
        name, reason = asked.name, "trainer.environment"
    elif environ.get(VARIABLE):
        name, reason = environ[VARIABLE], VARIABLE
    else:
        name, reason = _by_claims(claims, findings)
    try:
        plugin = plugins.get("environment", name, where=VARIABLE if reason == VARIABLE else "trainer.environment")
        chosen = asked if isinstance(asked, EnvironmentConfigBase) else parse_backend("environment", name, plugins)
        config = cast("EnvironmentConfigBase", chosen)
        in_job = any(claim.specificity >= Specificity.SCHEDULER for claim in claims.values())
        known = starting or in_job or name in claims or name == FALLBACK
        topology = (
            answer(plugins, plugin, "fairlead_topology", Topology, config=config, environ=environ) if known else None
        )
    except FairleadError as error:
        code = error.code or ("environment-malformed" if name in plugins.names("environment") else "unknown-tag")
        findings.append(Finding.of(error, "error", code, where=error.where or "trainer.environment"))
        return ChosenEnvironment(None, Setting(name, reason), claims, None, job, tuple(findings))
    if name not in claims and name != FALLBACK:
        seen = ", ".join(f"{tag} ({claim.evidence})" for tag, claim in claims.items()) or "nothing"
        findings.append(
            Finding(
                "warning" if starting or in_job else "info",
                "environment-unclaimed",
                f"the environment {name!r} was asked for, but this process does not look like one of its ranks",
                where=reason,
                why=f"found here: {seen}",
                fix=f"start it the way {name} starts ranks, or leave the environment out",
            )
        )
    return ChosenEnvironment(config, Setting(name, reason), claims, topology, job, tuple(findings))


def _by_claims(claims: Mapping[str, Claim], findings: list[Finding]) -> tuple[str, str]:
    if not claims:
        return FALLBACK, "nothing says otherwise"
    name, claim = next(iter(claims.items()))
    rivals = [tag for tag, other in claims.items() if other.specificity == claim.specificity]
    if len(rivals) > 1:
        evidence = "; ".join(f"{tag}: {claims[tag].evidence}" for tag in rivals)
        findings.append(
            Finding(
                "warning",
                "environment-tie",
                f"{' and '.join(rivals)} both claim this process; {name} is taken",
                where="trainer.environment",
                why=evidence,
                fix=f"choose one: `environment: {rivals[0]}`, or export {VARIABLE}={rivals[0]}",
            )
        )
    passed = [f"{tag} ({other.evidence})" for tag, other in claims.items() if other.specificity < claim.specificity]
    reason = claim.evidence
    passed = [text for text in passed if not text.startswith(FALLBACK)]
    return name, f"{reason}; it is inside {', '.join(passed)}" if passed else reason
