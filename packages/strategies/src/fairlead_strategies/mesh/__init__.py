"""What `fsdp2`, `tensor_parallel` and `hybrid` share: one mesh of ranks, and one order in which a model is split."""
