"""Where a kernel's time goes: counters or, without them, models; rules that turn them into causes and experiments."""

from cudadent42.profile.diagnosis import diagnose
from cudadent42.profile.records import Diagnosis, Profile

__all__ = ["Diagnosis", "Profile", "diagnose"]
