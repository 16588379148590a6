"""``make demo``: a word count that is killed twice and comes back at another parallelism."""
