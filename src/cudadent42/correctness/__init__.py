"""How far a result is from the right one."""
