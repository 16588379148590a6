"""Keyed state: what a function keeps per key, in memory over an optional store on local disk."""
