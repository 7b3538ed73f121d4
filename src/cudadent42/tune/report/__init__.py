"""What a tuning came to, as a page and as lines."""
