"""The requeuer `exit_code`: the exit code asks for another start."""
