"""A copy of a run folder in a bucket, made from here with the user's own rights: the instance needs none."""

from __future__ import annotations

from pathlib import Path

from cudadent42.remote.core.terminal import Say
from cudadent42.remote.providers.gce import gcloud
from cudadent42.remote.providers.gce.failures import CloudError, Failure


def check_exists(bucket: str) -> None:
    """Raises CloudError where there is no such bucket. A role that may write need not be one that may ask."""
    name = bucket.removeprefix("gs://").partition("/")[0]
    try:
        gcloud.ask(f"looking at gs://{name}", "storage", "buckets", "describe", f"gs://{name}")
    except CloudError as error:
        if error.failure is not Failure.PERMISSION:
            raise


def copy(folder: Path, bucket: str, job: str, say: Say) -> None:
    """Copy a run folder to ``BUCKET/JOB``. The folder is here, so a failure is said and nothing more."""
    target = f"{bucket}/{job}"
    try:
        # From within, as ".": a path of its own would be searched for wildcards.
        gcloud.run(
            f"copying to {target}",
            ("storage", "rsync", "--recursive", ".", target),
            gcloud.TIMEOUT_S,
            cwd=folder,
        )
    except CloudError as error:
        say(f"{error}\nthe run folder is here, in {folder}; it is not in {bucket}")
    else:
        say(f"copied to {target}")
