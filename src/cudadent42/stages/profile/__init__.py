"""Where time is spent on a machine: counters, or models where there are none."""
