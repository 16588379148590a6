"""Benchmarks: figures, never assertions. ``make bench`` runs all, ``make bench NAME=state`` one."""
