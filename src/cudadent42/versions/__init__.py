"""States of a source tree, loaded beside each other into one process."""
