"""Whether a resumed run ends with the same bits as an undisturbed one: exact, not exact, or not known; torch-free.

Loaders and state are not guessed at: a start writes down what it has seen of them (`record`), and `explain_exactness`
puts that and the settings together. `fairlead fit JOB --prove-resume` tries the job itself.
"""

from __future__ import annotations

from fairlead.exactness.explain import Exactness, explain_exactness
from fairlead.exactness.kernels import inexact_kernels
from fairlead.exactness.recorded import (
    EXACTNESS_FILE,
    TRIAL,
    Verdict,
    job_digest,
    last_record,
    record,
    sentence,
    verdict,
)
from fairlead.exactness.settings import device_reasons

__all__ = [
    "EXACTNESS_FILE",
    "TRIAL",
    "Exactness",
    "Verdict",
    "device_reasons",
    "explain_exactness",
    "inexact_kernels",
    "job_digest",
    "last_record",
    "record",
    "sentence",
    "verdict",
]
