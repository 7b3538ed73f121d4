"""What every machine elsewhere has in common: connections, jobs, money, protection."""
