"""For unit tests of handlers."""
