"""Submitting by kubectl: what is alike for all kinds of jobs on Kubernetes."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from fairlead import yaml
from fairlead.errors import FairleadError
from fairlead_launch.submission.interface import JobState, NotAnsweredError, Request, Submitter, of_all
from fairlead_launch.submission.pods import Member, PodSubmitterConfig, members, object_name, selector
from fairlead_runs.programs import Attempt, attempt, find

FILE: Final = "manifests.yaml"
"""What `kubectl create` gets."""
_PATIENCE_S: Final = 60.0
_LOG: Final = re.compile(r"[EFIW]\d{4} \d\d:\d\d")


class KubectlSubmitter(Submitter):
    """Makes objects in a cluster with kubectl, whose configuration says which cluster and who asks."""

    config: PodSubmitterConfig
    kinds: ClassVar[tuple[str, ...]]
    """The kinds of objects that are made for a job, that of the job itself first."""

    @abstractmethod
    def objects(self, request: Request, member: Member) -> list[dict[str, Any]]:
        """What is made for one run, in this order."""

    @abstractmethod
    def read(self, status: Mapping[str, Any]) -> JobState:
        """What the `status` of the job's object says."""

    def render(self, request: Request) -> Mapping[str, str]:
        """One file with all objects."""
        runs = members(self.config, request)
        return {FILE: "---\n".join(yaml.dump(one) for member in runs for one in self.objects(request, member))}

    def submit(self, request: Request, files: Sequence[Path]) -> str:
        """`kubectl create`; of what is refused in part nothing is left."""
        done = self._run("create", "-f", str(files[0]), "-o", "name")
        if done.code is None:
            raise NotAnsweredError(
                f"kubectl create did not answer within {_PATIENCE_S:g} s: the job may be in the cluster, or not",
                where=self._location(),
                why=_message(done),
                fix=f"see `kubectl get {self.kinds[0]} -l {selector(object_name(request))}` before you resubmit it",
            )
        if done.code != 0:
            if made := done.output.split():
                self._run("delete", "--wait=false", *made)
            raise self._refused("the cluster did not take the job", done)
        return object_name(request)

    def state(self, job: str) -> JobState:
        """From the object's status; of a full sweep the phase of the members that are not over."""
        each = 'jsonpath={range .items[*]}{.metadata.name} {.status}{"\\n"}{end}'
        try:
            done = self._run("get", self.kinds[0], "-l", selector(job), "-o", each)
        except FairleadError as error:
            return JobState("unknown", error.what)
        if done.code != 0:
            return JobState("unknown", _message(done))
        # A job that the controller has not looked at yet has no status.
        statuses = (line.partition(" ")[2].strip() or "{}" for line in done.output.splitlines())
        return of_all((self.read(json.loads(status)) for status in statuses), "there is no such job any more")

    def cancel(self, job: str) -> None:
        """`kubectl delete` of all that was made for the job; its pods get a signal and the grace to save."""
        done = self._run("delete", ",".join(self.kinds), "-l", selector(job), "--wait=false", "-o", "name")
        if done.code != 0:
            raise self._refused(f"{job} was not ended", done)
        if "/" not in done.output:  # the names of what was deleted; without any, kubectl says so
            raise FairleadError(
                f"there is no job {job}",
                where=self._location(),
                fix="if it is in another cluster, see `submit.context`",
            )

    def member(self, job: str, index: int) -> str:
        """The name of one member's objects."""
        return f"{job}-{index}"

    def logs_command(self, job: str) -> Sequence[str]:
        """`kubectl logs` of all pods of a job: the last thousand lines of each, each line with its pod."""
        return (*self._words(), "logs", "-l", selector(job), "--prefix", "--tail=1000", "--max-log-requests=64")

    def _words(self) -> list[str]:
        chosen = {"--context": self.config.context, "--namespace": self.config.namespace}
        return ["kubectl", *(f"{option}={value}" for option, value in chosen.items() if value is not None)]

    def _run(self, *arguments: str) -> Attempt:
        program, *options = self._words()
        found = find(program, self.environ)
        if found is None:
            raise FairleadError(
                "kubectl is not on the PATH",
                where="PATH",
                why="it is what talks to the cluster",
                fix="install it (https://kubernetes.io/docs/tasks/tools); "
                "or have what `fairlead submit --dry-run` prints applied where it is",
            )
        return attempt([found, *options, *arguments], _PATIENCE_S, self.environ, complaint_bytes=1 << 14)

    def _location(self) -> str:
        return " ".join(self._words())

    def _refused(self, what: str, done: Attempt) -> FairleadError:
        return FairleadError(
            what,
            where=self._location(),
            why=_message(done),
            fix="`submit.context` and `submit.namespace` say where; `kubectl auth can-i create jobs` whether you may",
        )


def _message(done: Attempt) -> str:
    """Why kubectl failed, without the log of its libraries."""
    if done.code is None:
        return f"kubectl did not answer within {_PATIENCE_S:.0f} s"
    lines = dict.fromkeys(line for line in done.complaint.splitlines() if not _LOG.match(line))
    return "\n".join(list(lines)[-10:]) or done.message


def state_by(status: Mapping[str, Any], details: Mapping[str, str]) -> JobState | None:
    """What an object's conditions say: it is complete, has failed, or is suspended; None: it is under way."""
    holding = (one for one in status.get("conditions", []) if one.get("status") == "True")
    conditions = {one["type"]: ": ".join(filter(None, (one.get("reason"), one.get("message")))) for one in holding}
    if "Complete" in conditions:
        return JobState("finished", details=details)
    if "Failed" in conditions:
        return JobState("failed", conditions["Failed"], details)
    return JobState("queued", conditions["Suspended"], details) if "Suspended" in conditions else None
