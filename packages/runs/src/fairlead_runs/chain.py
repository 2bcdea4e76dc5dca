"""A chain of SLURM jobs, for clusters that let no job be requeued: K jobs of one name, of which one runs at a time.

A stop needs nothing but its checkpoint: the next job of the chain starts, and resumes. What `sbatch` and the batch
script need for it is here; the requeuer `chain` knows in the job that it is in one.

    sbatch $OPTIONS job.sh     # K times

with, in `job.sh`, the line of `chain_begin` before the ranks, and those of `chain_end` behind them.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from fairlead_runs.exit_codes import NOT_AGAIN

CHAIN: Final = "FAIRLEAD_CHAIN"
"""The variable with the name of the chain that a job belongs to."""
_NAME_LENGTH: Final = 60


def chain_name(run: Path) -> str:
    """The name of a run's chain: no other run's, for SLURM takes all of a user's jobs of one name for one chain.

    Example:
        >>> chain_name(Path("/runs/gpt"))
        'gpt-639ef360'
    """
    return f"{run.name[:_NAME_LENGTH]}-{hashlib.sha256(str(run.absolute()).encode()).hexdigest()[:8]}"


def chain_options(name: str) -> Mapping[str, str | bool]:
    """The options of `sbatch` for each job of the chain, by their long names; True: one without a value.

    Example:
        >>> chain_options("gpt")
        {'job-name': 'gpt', 'dependency': 'singleton', 'no-requeue': True}
    """
    return {"job-name": name, "dependency": "singleton", "no-requeue": True}


def chain_begin(name: str) -> str:
    """The line of the batch script before the ranks."""
    return f"export {CHAIN}={shlex.quote(name)}"


def chain_end(code: str = "$?") -> str:
    """The lines of the batch script behind the ranks: what is left of the chain is cancelled where it is of no use.

    That is after a run that is finished, and one whose code says that it is not to run again: see
    `fairlead_runs.exit_codes`. A stop by a person cancels the rest itself. After any other code, as 75 or that of a
    crash, the next job goes on. They end with the code of the ranks.

    Args:
        code: What the shell has the ranks' exit code in.
    """
    codes = "|".join(str(int(one)) for one in NOT_AGAIN)
    return (
        f"code={code}\n"
        f"case $code in {codes})\n"
        f'    scancel --user="$(id -un)" --name="${CHAIN}" --state=PENDING ;;\n'
        "esac\n"
        "exit $code"
    )
