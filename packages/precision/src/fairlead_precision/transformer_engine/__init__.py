"""8-bit floating point by NVIDIA's Transformer Engine."""
