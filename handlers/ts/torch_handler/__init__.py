"""Default handlers, and the classes that user handlers derive from."""
