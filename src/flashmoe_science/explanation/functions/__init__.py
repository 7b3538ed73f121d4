"""The functions that `explain` knows: a module each, whose ``EXPLAINED`` is an `explanation.record.Explainable`."""
