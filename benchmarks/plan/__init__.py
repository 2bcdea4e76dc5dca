"""How wrong `fairlead plan` is: on published runs, and on steps that were measured."""
