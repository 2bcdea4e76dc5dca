"""What a run writes and reads back: its directory, checkpoints, history and heartbeats; for any loop, without torch.

The process that trains opens it with `RunDirectory.open`; `fairlead runs` and `status` read it with `list_runs`
and `state`.
"""

from __future__ import annotations

from fairlead.secret_names import is_secret_name
from fairlead_runs.budget import StartCounts, count_starts, refusal
from fairlead_runs.directory import RunDirectory
from fairlead_runs.fingerprints import Difference, Fingerprint, fingerprint
from fairlead_runs.heartbeat import Beat, Heartbeat, heartbeat_path, read_heartbeats
from fairlead_runs.history import History, read_history
from fairlead_runs.naming import render_name, run_path, safe_name
from fairlead_runs.provenance import CodeChange, code_change, collect_provenance, git_state, origin
from fairlead_runs.redaction import redact, redact_argv, redact_text
from fairlead_runs.states import RunState, is_run, list_runs, state

__all__ = [
    "Beat",
    "CodeChange",
    "Difference",
    "Fingerprint",
    "Heartbeat",
    "History",
    "RunDirectory",
    "RunState",
    "StartCounts",
    "code_change",
    "collect_provenance",
    "count_starts",
    "fingerprint",
    "git_state",
    "heartbeat_path",
    "is_run",
    "is_secret_name",
    "list_runs",
    "origin",
    "read_heartbeats",
    "read_history",
    "redact",
    "redact_argv",
    "redact_text",
    "refusal",
    "render_name",
    "run_path",
    "safe_name",
    "state",
]
