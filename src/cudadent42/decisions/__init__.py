"""What follows from samples: schedule, statistics, verdicts, and the records of gates."""
