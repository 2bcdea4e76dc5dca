"""`fairlead verify JOB`: the layout of a job against one process, in numbers."""
