"""The backend `async`: the loop waits for a copy in memory only, a thread writes."""
