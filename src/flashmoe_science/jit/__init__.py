"""From source text to a loaded kernel: compilers, and the cache of what they made."""
