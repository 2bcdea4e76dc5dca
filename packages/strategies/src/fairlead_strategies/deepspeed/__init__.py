"""DeepSpeed's ZeRO stages."""
