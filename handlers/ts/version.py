"""The version of TorchServe whose handler API this package follows.

Handlers compare this number to decide what they may call, so it names the level of compatibility
and not the release of the server; that one is `context.system_properties["server_version"]`.
"""

__version__ = "0.12.0"
