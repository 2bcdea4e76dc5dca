"""Hands a job to a scheduler: the copy of its code, its job files and its script; never imports torch."""

from __future__ import annotations

from fairlead_launch.submission.batch import Raw, option, render_template, words
from fairlead_launch.submission.interface import JobState, NotAnsweredError, Phase, Request, Submitter
from fairlead_launch.submission.submission import Submission, submit
from fairlead_runs.submitted import Record, read_submission

__all__ = [
    "JobState",
    "NotAnsweredError",
    "Phase",
    "Raw",
    "Record",
    "Request",
    "Submission",
    "Submitter",
    "option",
    "read_submission",
    "render_template",
    "submit",
    "words",
]
