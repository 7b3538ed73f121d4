"""Where machines elsewhere come from."""
