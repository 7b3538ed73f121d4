"""Where a kernel's time goes: counters or, without them, models; rules that turn them into causes and experiments."""
