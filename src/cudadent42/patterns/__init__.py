"""Lessons with symptoms that a machine can match, so that a failing step prints the one that applies."""

from cudadent42.patterns.evidence import Log, PatternEvidence
from cudadent42.patterns.lessons import Lesson, library
from cudadent42.patterns.matching import Match, match
from cudadent42.patterns.show import after_failure, print_matches

__all__ = ["Lesson", "Log", "Match", "PatternEvidence", "after_failure", "library", "match", "print_matches"]
