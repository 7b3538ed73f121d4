"""What is done in a run, each stage by itself: records in, records out. No stage imports another."""
