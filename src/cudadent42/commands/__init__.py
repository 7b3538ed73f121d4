"""The commands of the command line, a module for each group. They parse and print; the work is elsewhere."""
