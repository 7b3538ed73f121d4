"""Is this machine ready? A table of checks, each with its cause and the command that mends it.

``table.DEFINITIONS`` lists them, one module per topic holds the probes, ``runner.inspect`` runs them. All
of it works on a bare Python: no third-party import at module level.
"""
