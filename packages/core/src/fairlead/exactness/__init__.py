"""Whether a resumed run ends with the same bits as an undisturbed one: exact, not exact, or not known; torch-free.

`device_reasons` reads the settings and asks the plugins.  Loaders and state are not guessed at: a start writes down
what it has seen of them (`record`), and `explain_exactness` puts both together.  The verdict goes as far as `SCOPE`
says; `fairlead fit JOB --prove-resume` tries the job itself.
"""

from __future__ import annotations

from fairlead.exactness.explain import Exactness, explain_exactness
from fairlead.exactness.recorded import EXACTNESS_FILE, TRIAL, Recorded, job_digest, last_record, record
from fairlead.exactness.settings import device_reasons
from fairlead.exactness.verdicts import NOT_SEEN, SCOPE, Verdict, sentence, verdict

__all__ = [
    "EXACTNESS_FILE",
    "NOT_SEEN",
    "SCOPE",
    "TRIAL",
    "Exactness",
    "Recorded",
    "Verdict",
    "device_reasons",
    "explain_exactness",
    "job_digest",
    "last_record",
    "record",
    "sentence",
    "verdict",
]
