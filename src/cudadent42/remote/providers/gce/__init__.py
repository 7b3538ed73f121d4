"""Instances of Google Compute Engine: started, used, read back, and stopped or deleted.

    gcloud (the tool, and what its failures mean) -> machine (one instance) -> reach (a connection to it)
        -> starting (until it answers and has its limits) -> lease (from there to its end)

Everything goes through the user's own ``gcloud``. What may cost money is on record before it is asked for.
"""
