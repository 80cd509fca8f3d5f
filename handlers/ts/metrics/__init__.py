"""Metrics of handlers, behind `context.metrics`."""
