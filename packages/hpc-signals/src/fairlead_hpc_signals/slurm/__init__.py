"""The requeuer `slurm`: `scontrol requeue`."""
