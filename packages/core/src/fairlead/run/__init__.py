"""The run directory: fingerprint, lock, starts, history, provenance, heartbeats; torch-free.

```
runs/gpt/
  job.yaml              the job as asked, secrets redacted
  fingerprint.json      the settings that make it this run
  starts/N/             resolution.json, provenance.json of each start
  history.jsonl         one event a line
  metrics.csv           written by the trainer
  checkpoints/          `fairlead.commit`
  logs/  heartbeats/    written by the ranks
  .lock                 who is using it now
```

The process that trains opens it with `RunDirectory.open`; `fairlead runs` and `status` read it with `list_runs`
and `state`.
"""

from __future__ import annotations

from fairlead.run.budget import Spent, refusal, spent
from fairlead.run.directory import RunDirectory
from fairlead.run.fingerprints import LIMITS, MAY_CHANGE, Difference, Fingerprint, fingerprint
from fairlead.run.heartbeat import Beat, Heartbeat, heartbeat_path, read_heartbeats
from fairlead.run.history import History, read_history
from fairlead.run.naming import array_task, render_name, run_path, safe_name
from fairlead.run.provenance import CodeChange, code_change, collect_provenance, git_state, origin, scheduler_job
from fairlead.run.redaction import REDACTED, is_secret_name, redact, redact_argv, redact_text
from fairlead.run.states import RunState, is_run, list_runs, state

__all__ = [
    "LIMITS",
    "MAY_CHANGE",
    "REDACTED",
    "Beat",
    "CodeChange",
    "Difference",
    "Fingerprint",
    "Heartbeat",
    "History",
    "RunDirectory",
    "RunState",
    "Spent",
    "array_task",
    "code_change",
    "collect_provenance",
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
    "scheduler_job",
    "spent",
    "state",
]
