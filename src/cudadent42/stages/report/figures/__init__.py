"""The pictures of a report, each a function from a ``View`` to SVG text."""
