"""DeepSpeed's ZeRO: optimizer state, gradients and parameters split over the ranks."""
