"""Flink's keyed and operator state for Python, checkpointed on any fsspec storage."""
