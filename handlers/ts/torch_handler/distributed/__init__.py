"""Handlers of models that a group of processes shares."""
