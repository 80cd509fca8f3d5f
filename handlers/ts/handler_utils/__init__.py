"""Helpers that handlers import."""
