"""The audit of a result: processes apart, inputs of its own for every call, the parent's clock.

    parent (`referee`)           keeps the clock and the seeds, and stops every process whose turn it is not
      nursery                    has imported PyTorch and nothing of a candidate; the others are forked from it
        baseline (`contestant`)  makes the inputs, is timed, computes the reference, judges
        candidate (`contestant`) is given inputs, is timed, hands back results; knows neither seed nor reference

Nothing that the candidate's process says is believed but that it is done, and then it is stopped.
"""
