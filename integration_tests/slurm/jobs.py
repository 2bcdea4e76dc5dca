"""Jobs on the test cluster: submitted, watched, waited for."""

from __future__ import annotations

import re
import subprocess
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from integration_tests.slurm.cluster import Cluster
from integration_tests.slurm.system import wait_until

__all__ = ["ENDED", "Job", "submit"]

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL")
"""The states that a job does not leave by itself."""


@dataclass(frozen=True)
class Job:
    """A job that was submitted.

    Args:
        cluster: Where.
        id: As SLURM's commands take it; of an array, its own.
        output: What its script and its steps print.
    """

    cluster: Cluster
    id: str
    output: Path

    def shown(self) -> dict[str, str]:
        """What `scontrol show job` says of it; of an array, of its last task."""
        text = self.cluster.run("scontrol", "show", "job", "-o", self.id).splitlines()[-1]
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def nodes(self) -> list[str]:
        """Where it runs, that of the batch script first."""
        return self.cluster.run("scontrol", "show", "hostnames", self.shown()["NodeList"]).split()

    def state(self) -> str:
        """The name of its state."""
        return self.shown()["JobState"]

    def wait(self, *states: str, seconds: float = 300) -> str:
        """Waits for one of some states; that which came.

        Raises:
            TimeoutError: None came; the message ends with what the job has printed.
        """
        wanted, state = states or ENDED, ""

        def there() -> bool:
            nonlocal state
            state = self.state()
            return state in wanted

        try:
            wait_until(f"job {self.id} is {' or '.join(wanted)}", there, seconds)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; it is {state}\n{self.text()}") from error
        return state

    def wait_for_text(self, words: str, seconds: float = 300) -> None:
        """Waits until it has printed some words.

        Raises:
            TimeoutError: It has not.
        """
        try:
            wait_until(f"job {self.id} prints {words!r}", lambda: words in self.text(), seconds)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; it is {self.state()}\n{self.text()}") from error

    def text(self) -> str:
        """What it has printed so far."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def signal(self, name: str, *options: str) -> None:
        """`scancel -s NAME`; to the tasks, with `-b` to the batch script, with `-f` to all."""
        self.cluster.run("scancel", *options, "-s", name, self.id)


def submit(cluster: Cluster, script: str, cwd: Path, *options: str, environ: Mapping[str, str] | None = None) -> Job:
    """Submits a batch script.

    Args:
        cluster: Where.
        script: Its lines behind the first one.
        cwd: Where it runs, and prints into `job-ID.out`, which a requeued job goes on with.
        options: Of `sbatch`.
        environ: Variables besides those of this process.
    """
    words = ["sbatch", "--parsable", "--open-mode=append", "--output=job-%A.out", *options]
    done = subprocess.run(
        words,
        input=f"#!/bin/bash\n{textwrap.dedent(script)}",
        cwd=cwd,
        env={**cluster.environ(), **(environ or {})},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr}")
    number = done.stdout.strip().partition(";")[0].partition("+")[0]
    return Job(cluster, number, cwd / f"job-{number}.out")
