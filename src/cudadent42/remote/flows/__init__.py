"""What is done with machines elsewhere, in order: a run on one, the survey of all, and their end."""
