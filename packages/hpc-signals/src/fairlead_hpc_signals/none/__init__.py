"""The requeuer `none`: the job is not started again."""
