"""Clocks: timers on CPU and GPU, the cache flushed between calls, memory and peaks of the device."""
