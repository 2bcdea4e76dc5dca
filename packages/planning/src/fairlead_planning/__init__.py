"""Memory, time and goodput of a training job, before it queues."""
