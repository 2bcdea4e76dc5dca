"""`fairlead bench ...`: what is fast on this machine, measured with the user's own job."""
