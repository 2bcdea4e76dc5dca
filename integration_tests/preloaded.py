"""What `fairlead` imports sooner or later, plugins included: a fork server imports this module, once."""

from fairlead.plugins import PluginManager

PluginManager().records(load=True)
