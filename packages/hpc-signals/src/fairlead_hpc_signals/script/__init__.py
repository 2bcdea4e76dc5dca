"""The requeuer `script`: a script for the job script to run."""
