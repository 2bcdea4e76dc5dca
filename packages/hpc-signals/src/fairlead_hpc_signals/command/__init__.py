"""The requeuer `command`: a command of the user's."""
