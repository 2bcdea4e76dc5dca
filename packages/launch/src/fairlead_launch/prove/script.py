"""`fairlead launch --prove-resume`: whether a script resumes with the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from fairlead.cli.session import Session
from fairlead.errors import ConfigError
from fairlead_launch.hosts import option_words
from fairlead_launch.outer_launch import find_outer_launch
from fairlead_launch.prove.course import Proof
from fairlead_launch.prove.plan import Plan
from fairlead_launch.settings import LaunchConfig
from fairlead_launch.trials import trial_folder


def prove_script(config: LaunchConfig, script: Sequence[str], session: Session, steps: int) -> int:
    """Tries a resume of the script, with its words; 0: equal in every bit, 1: not.

    Its runs are trained in a folder of their own, in the working directory.
    """
    if steps < 3:
        raise ConfigError("--prove-steps needs at least 3", where="--prove-steps", fix="--prove-steps 8")
    outer = find_outer_launch(config.nproc_per_node, 1, session.environ, session.plugins)
    if config.nodes != (1, 1) or config.hosts is not None or config.hostfile is not None or outer is not None:
        raise ConfigError(
            "--prove-resume starts its ranks itself, on one machine",
            where="--prove-resume",
            why=f"started by {outer.by}" if outer is not None else "several nodes are requested",
            fix="run it without a launcher, on one node: fairlead launch --nproc 2 --prove-resume SCRIPT",
        )
    with trial_folder(session.cwd, ".prove-") as (folder, retained):
        return _ScriptProof(config, script, session, folder, Plan.of(steps)).run(retained)


class _ScriptProof(Proof):
    fixes: ClassVar = {
        "callback": "have it return it from state() and be an ExportableState (Hugging Face), or from state_dict() "
        "and load_state_dict() (Lightning)",
        "model": "make it a buffer of the module, or keep it in run.state of a Run",
        "module": "keep it in run.state, or register an object with state_dict() that holds it: a module's variable "
        "starts fresh in each process",
    }
    deterministic = "torch.manual_seed(1), torch.use_deterministic_algorithms(True)"

    def __init__(self, config: LaunchConfig, script: Sequence[str], session: Session, folder: Path, plan: Plan) -> None:
        super().__init__(session, script[0], folder, plan)
        own = {"max_restarts": 0, "log_dir": str(folder / "logs"), "tail": "all"}
        module = ["-m"] if config.module else []
        self._words = ["launch", *option_words(config.model_copy(update=own)), *module, *script]

    def words(self) -> list[str]:
        return self._words
