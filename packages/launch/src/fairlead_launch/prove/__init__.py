"""Whether a resume gives the same bits, tried: `fairlead fit --prove-resume` and `fairlead launch --prove-resume`."""
