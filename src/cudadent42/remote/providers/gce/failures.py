"""What ``gcloud`` says when something fails, and what to do about it.

The patterns are parts of messages that the tool and the service have been seen to print; a message that matches none is
shown whole and not interpreted.
"""

from __future__ import annotations

import re
from enum import Enum

from cudadent42.base.errors import ExitCode, LabError


class Failure(Enum):
    """Why a call of ``gcloud`` failed."""

    NO_TOOL = "gcloud is not installed"
    NOT_LOGGED_IN = "gcloud is not logged in"
    API_DISABLED = "the Compute Engine API is not enabled"
    BILLING_DISABLED = "the project has no billing account"
    PERMISSION = "permission denied"
    QUOTA_GLOBAL = "the project's quota over all regions is used up"
    QUOTA_REGION = "the quota of this region is used up"
    RATE_LIMIT = "too many requests a minute"
    NO_CAPACITY = "the zone has no capacity"
    NOT_IN_ZONE = "the zone does not offer this machine"
    NO_IMAGE = "no such image"
    NO_INSTANCE = "no such instance"
    NO_PROJECT = "no such project"
    NO_NETWORK = "no such network"
    POLICY = "a policy of the organisation forbids it"
    NO_TUNNEL = "no access through Identity-Aware Proxy"
    LOCAL_SSD = "the instance has local SSDs"
    TIMED_OUT = "gcloud did not answer"
    UNKNOWN = "gcloud failed"


OTHER_ZONE_MAY_DO = frozenset((Failure.NO_CAPACITY, Failure.NOT_IN_ZONE, Failure.QUOTA_REGION))
"""Where the next zone of a specification is worth trying; for a region's quota, one of another region."""

_CONSOLE = "https://console.cloud.google.com"
_ADVICE = {
    Failure.NO_TOOL: "install the Google Cloud CLI, https://cloud.google.com/sdk/docs/install, then: gcloud auth login",
    Failure.NOT_LOGGED_IN: "log in with: gcloud auth login",
    Failure.API_DISABLED: "enable it with: gcloud services enable compute.googleapis.com --project=PROJECT",
    Failure.BILLING_DISABLED: f"link one at {_CONSOLE}/billing",
    Failure.PERMISSION: "ask the project's owner for the role roles/compute.instanceAdmin.v1, "
    "and for roles/iam.serviceAccountUser where the instance has a service account",
    Failure.QUOTA_GLOBAL: f"ask for more at {_CONSOLE}/iam-admin/quotas, or stop another instance with a GPU",
    Failure.QUOTA_REGION: f"take a zone of another region, or ask for more at {_CONSOLE}/iam-admin/quotas",
    Failure.RATE_LIMIT: "wait a minute, then try again",
    Failure.NO_CAPACITY: "try later, or in another zone: a specification (remote add --spec) takes several",
    Failure.NOT_IN_ZONE: "see where it is: gcloud compute machine-types list, gcloud compute accelerator-types list",
    Failure.NO_IMAGE: "list them with: gcloud compute images list --project=IMAGE_PROJECT",
    Failure.NO_INSTANCE: "list them with: gcloud compute instances list --project=PROJECT",
    Failure.NO_PROJECT: "list yours with: gcloud projects list",
    Failure.NO_NETWORK: "name one in the specification: network, subnet",
    Failure.POLICY: "where external addresses are forbidden, say external_ip = false in the specification",
    Failure.NO_TUNNEL: "ask the project's owner for the role roles/iap.tunnelResourceAccessor",
    Failure.LOCAL_SSD: "a stop loses what is on them: stop it with --discard-local-ssd=true, or use --after keep",
    Failure.TIMED_OUT: "look at the network, then try again",
    Failure.UNKNOWN: "gcloud gave no other reason",
}

# The first that matches wins: a refused permission names a resource too, and a quota may come with a 403. A message's
# white space is one blank here, since the tool folds long lines.
_PATTERNS: tuple[tuple[Failure, str], ...] = (
    (
        Failure.NOT_LOGGED_IN,
        r"do not currently have an active account selected|problem refreshing (?:your current )?auth tokens"
        r"|Reauthentication (?:failed|required)|gcloud auth login|invalid authentication credentials",
    ),
    (
        Failure.NO_CAPACITY,
        r"ZONE_RESOURCE_POOL_EXHAUSTED|does not have enough resources available to fulfill the request"
        r"|is currently unavailable in the \S+ zone|resource_availability|STOCKOUT",
    ),
    (
        Failure.BILLING_DISABLED,
        r"BILLING_DISABLED|requires billing to be enabled|billing account [^.]*(?:closed|disabled)",
    ),
    (
        Failure.API_DISABLED,
        r"SERVICE_DISABLED|API has not been used in project|API \[compute\.googleapis\.com\] not enabled",
    ),
    (Failure.RATE_LIMIT, r"Quota exceeded for quota metric|rateLimitExceeded|RATE_LIMIT_EXCEEDED"),
    (Failure.QUOTA_GLOBAL, r"Quota '\w*_ALL_REGIONS' exceeded|Quota '\w+' exceeded\. Limit: [\d.]+ globally"),
    (Failure.QUOTA_REGION, r"Quota '\w+' exceeded|QUOTA_EXCEEDED"),
    (Failure.LOCAL_SSD, r"discard-local-ssd"),
    (Failure.POLICY, r"Constraint constraints/\S+ violated"),
    (Failure.NO_TUNNEL, r"Error while connecting \[4033: 'not authorized'\]"),
    (
        Failure.PERMISSION,
        r"Required '\S+' permission for|PERMISSION_DENIED|does not have (?:\S+ )?(?:permission|access) to"
        r"|Insufficient (?:IAM )?[Pp]ermission",
    ),
    (
        Failure.NO_IMAGE,
        r"resource 'projects/\S+/global/images/\S+' was not found|Could not fetch image resource",
    ),
    (
        Failure.NOT_IN_ZONE,
        r"/(?:machineTypes|acceleratorTypes)/\S+' was not found"
        r"|[Mm]achine type with name '\S+' does not exist in zone",
    ),
    (Failure.NO_INSTANCE, r"resource 'projects/\S+/zones/\S+/instances/\S+' was not found"),
    (Failure.NO_NETWORK, r"resource 'projects/\S+/(?:networks|subnetworks)/\S+' was not found"),
    (
        Failure.NO_PROJECT,
        r"resource 'projects/[^/']+' was not found|Failed to find project|Unknown project id",
    ),
)
_COMPILED = tuple((failure, re.compile(pattern)) for failure, pattern in _PATTERNS)


class CloudError(LabError):
    """``gcloud`` failed; ``failure`` says in what way."""

    exit_code = ExitCode.NOT_READY

    def __init__(self, failure: Failure, said: str, doing: str = "") -> None:
        self.failure = failure
        self.said = said
        """What the tool printed."""
        before = f"{doing}: " if doing else ""
        if failure is Failure.UNKNOWN:
            super().__init__(f"{before}{failure.value}; {_ADVICE[failure]}:\n{said}")
        else:
            super().__init__(f"{before}{failure.value}; {_ADVICE[failure]}{_quoted(said)}")


def recognise(said: str) -> Failure:
    """What an error message means; UNKNOWN where it is not one of those above."""
    text = " ".join(said.split())
    return next((failure for failure, pattern in _COMPILED if pattern.search(text)), Failure.UNKNOWN)


def _quoted(said: str) -> str:
    return f"\n{said}" if said else ""
