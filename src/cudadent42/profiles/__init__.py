"""Where a kernel's time goes: counters or, without them, models; rules that turn them into causes and experiments."""

from cudadent42.profiles.diagnosis import diagnose
from cudadent42.profiles.records import Diagnosis, Profile

__all__ = ["Diagnosis", "Profile", "diagnose"]
