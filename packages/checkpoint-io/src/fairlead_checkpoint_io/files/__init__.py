"""What the runtimes share: copying a state to host memory, writing it, reading it. Imports torch."""
