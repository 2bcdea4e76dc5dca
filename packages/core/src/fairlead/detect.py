"""Which environment started this process: all claims are collected, the most specific one wins."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar, cast

from fairlead.config_bases import EnvironmentConfigBase
from fairlead.errors import FairleadError
from fairlead.facts import Claim, Job, Setting, Specificity, Unused
from fairlead.findings import Finding
from fairlead.hooks import answer
from fairlead.open_union import parse_backend
from fairlead.plugin_classes import EnvironmentPlugin, RequeuePlugin
from fairlead.plugins import PluginManager
from fairlead.topology import Topology

VARIABLE = "FAIRLEAD_ENVIRONMENT"
"""Names the environment when neither the config nor detection should decide."""

FALLBACK = "lightning"
"""The environment of one machine, where nothing says otherwise."""

_JOB_VARIABLE: Final = re.compile(r"(?:^|_)JOB_?ID$")
"""What schedulers call the variable with the job's id: SLURM_JOB_ID, LSB_JOBID, PBS_JOBID, JOB_ID, OAR_JOB_ID."""

A = TypeVar("A")


@dataclass(frozen=True)
class ChosenEnvironment:
    """The environment of this process; None is a plugin that cannot be used, or a topology before run time.

    `claims` and `jobs` are by tag, the most specific first; jobs are known whatever the environment is.
    """

    config: EnvironmentConfigBase | None
    setting: Setting
    claims: Mapping[str, Claim]
    topology: Topology | None
    jobs: Mapping[str, Job]
    findings: tuple[Finding, ...]

    @property
    def job(self) -> Job | None:
        """The scheduler's job that this process is in."""
        return next(iter(self.jobs.values()), None)

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


def find_jobs(
    environ: Mapping[str, str],
    plugins: PluginManager,
    *,
    claims: Mapping[str, Claim] | None = None,
    findings: list[Finding] | None = None,
) -> dict[str, Job]:
    """The scheduler's job that this process is in, by the tag of the environment that knows it.

    Where several know one, that of the most specific claim comes first; an environment that claims nothing here, such
    as SLURM's inside `torchrun`, counts as a scheduler.
    """
    jobs = _answers("fairlead_job", Job, environ, plugins, findings)
    if not jobs:
        return {}
    known = _claims(environ, plugins) if claims is None else claims
    rank = {tag: known[tag].specificity if tag in known else Specificity.SCHEDULER for tag in jobs}
    return {tag: jobs[tag] for tag in sorted(jobs, key=lambda tag: (-rank[tag], tag))}


def _answers(
    hook: str, kind: type[A], environ: Mapping[str, str], plugins: PluginManager, findings: list[Finding] | None
) -> dict[str, A]:
    """What a hook of each installed environment returns, without None.

    A plugin that fails to answer is passed over, with a warning in `findings`: it may be an unused one.
    """
    found: dict[str, A] = {}
    for name, plugin in plugins.distinct("environment").items():
        try:
            if (one := answer(plugins, plugin, hook, kind, environ=environ)) is not None:
                found[name] = one
        except FairleadError as error:
            if findings is not None:
                findings.append(Finding.of(error, "warning", "plugin-broken", where=_where(name)))
    return found


def _where(tag: str) -> str:
    return f"the plugin environment.{tag}"


def choose_environment(
    requested: EnvironmentConfigBase | str,
    environ: Mapping[str, str],
    plugins: PluginManager,
    *,
    starting: bool = False,
) -> ChosenEnvironment:
    """Chooses by the config, then by FAIRLEAD_ENVIRONMENT, then by the claims.

    Unless the job is `starting`, this may be a login node, which need not look like a rank.
    """
    findings: list[Finding] = []
    claims = _claims(environ, plugins, findings)
    jobs = find_jobs(environ, plugins, claims=claims, findings=findings)
    if isinstance(requested, EnvironmentConfigBase):
        name, reason = requested.name, "trainer.environment"
    elif environ.get(VARIABLE):
        name, reason = environ[VARIABLE], VARIABLE
    else:
        name, reason = _by_claims(claims, findings)
    try:
        plugin = plugins.get("environment", name, where=VARIABLE if reason == VARIABLE else "trainer.environment")
        chosen = (
            requested if isinstance(requested, EnvironmentConfigBase) else parse_backend("environment", name, plugins)
        )
        config = cast("EnvironmentConfigBase", chosen)
        in_job = any(claim.specificity >= Specificity.SCHEDULER for claim in claims.values())
        known = starting or in_job or name in claims or name == FALLBACK
        topology = (
            answer(plugins, plugin, "fairlead_topology", Topology, config=config, environ=environ) if known else None
        )
    except FairleadError as error:
        code = error.code or ("environment-malformed" if name in plugins.names("environment") else "unknown-tag")
        findings.append(Finding.of(error, "error", code, where=error.where or "trainer.environment"))
        return ChosenEnvironment(None, Setting(name, reason), claims, None, jobs, tuple(findings))
    if name == FALLBACK and not (topology is not None and topology.launched):
        findings += _unused(environ, plugins, findings)
        if reason not in ("trainer.environment", VARIABLE):
            findings += _unheard(environ, plugins, jobs, findings, starting=starting)
    if name not in claims and name != FALLBACK:
        seen = ", ".join(f"{tag} ({claim.evidence})" for tag, claim in claims.items()) or "nothing"
        findings.append(
            Finding(
                "warning" if starting or in_job else "info",
                "environment-unclaimed",
                f"the environment {name!r} was requested, but this process does not look like one of its ranks",
                where=reason,
                why=f"found here: {seen}",
                fix=f"start it the way {name} starts ranks, or leave the environment out",
            )
        )
    return ChosenEnvironment(config, Setting(name, reason), claims, topology, jobs, tuple(findings))


def _unused(environ: Mapping[str, str], plugins: PluginManager, findings: list[Finding]) -> list[Finding]:
    """Allocations of which a single process would use one node, silently."""
    return [
        Finding(
            "warning",
            "allocation-unused",
            f"{unused.what}, but the run will use this machine only",
            where="trainer.environment",
            why=unused.why,
            fix=f"start it with {unused.launcher}, or ask for one node and one task",
        )
        for unused in _answers("fairlead_unused", Unused, environ, plugins, findings).values()
    ]


def _unheard(
    environ: Mapping[str, str],
    plugins: PluginManager,
    jobs: Mapping[str, Job],
    findings: list[Finding],
    *,
    starting: bool,
) -> list[Finding]:
    """A broken environment inside a job that no other plugin knows: each host would train alone."""
    broken = {record.name: str(record.error) for record in plugins.records("environment") if record.error is not None}
    for tag in plugins.names("environment"):
        reasons = [one.what for one in findings if one.code == "plugin-broken" and one.where == _where(tag)]
        broken.update(dict.fromkeys([tag] if reasons else [], "; ".join(reasons)))
    signs = [name for name in sorted(environ) if _JOB_VARIABLE.search(name) and environ[name]]
    if not broken or not signs or jobs.keys() - broken.keys() - {FALLBACK}:
        return []
    several = len(broken) > 1
    return [
        Finding(
            "error" if starting else "warning",
            "plugin-broken",
            f"this process is in a job, and the environment{'s' if several else ''} {', '.join(map(repr, broken))}, "
            f"which may know it, cannot be reached: every host would train alone",
            where="trainer.environment",
            why="\n".join([f"{signs[0]} is set", *(f"environment.{tag}: {text}" for tag, text in broken.items())]),
            fix=f"repair or uninstall {'them' if several else 'it'}; `environment: {FALLBACK}` trains on this machine "
            "alone all the same",
        )
    ]


def choose_requeuer(
    environment: str | None, jobs: Mapping[str, Job], environ: Mapping[str, str], plugins: PluginManager
) -> tuple[str, str]:
    """The tag of the requeuer that `auto` takes, and why, for the environment and the jobs that were found.

    Where the ranks come from and who restarts the job are two questions: torchrun may run in a batch job.
    """
    found = [
        (tag, evidence, plugin)
        for tag, plugin in plugins.distinct("requeue").items()
        if isinstance(plugin, RequeuePlugin) and (evidence := plugin.evidence(environ)) is not None
    ]
    for tag, evidence, plugin in found:
        if plugin.before_the_launcher:
            return tag, evidence
    owners = {environment: f"the requeuer of {environment}"} if environment is not None else {}
    for tag, job in jobs.items():
        if not job.interactive:
            owners.setdefault(tag, f"this is the job {job.id}")
    for tag, reason in owners.items():
        owner = plugins.loaded_one("environment", tag)
        if isinstance(owner, EnvironmentPlugin) and owner.requeue != "none":
            return owner.requeue, reason
    return next(((tag, evidence) for tag, evidence, _ in found), ("none", "no scheduler to ask"))


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
    passed = [text for text in passed if not text.startswith(FALLBACK)]
    return name, f"{claim.evidence}; it is inside {', '.join(passed)}" if passed else claim.evidence
