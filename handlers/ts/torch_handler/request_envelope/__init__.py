"""Shapes of requests and replies that the server can put around every handler.

Each module defines one class; `service_envelope` names the module.
"""
