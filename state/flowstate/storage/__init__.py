"""Checkpoint storage: the only part of the library that touches a file system."""
