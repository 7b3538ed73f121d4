"""Sessions: a protocol of checkpoints with minutes and gates, whose log survives whatever happens to the process."""
