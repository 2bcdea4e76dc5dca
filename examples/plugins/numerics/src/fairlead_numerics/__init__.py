"""An accelerator, a precision and a layer sync for Fairlead: examples from outside the project."""
