"""XLA devices: TPUs, and what else PJRT drives."""
