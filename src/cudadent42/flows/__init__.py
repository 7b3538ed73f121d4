"""The only places that know in which order the stages come."""
