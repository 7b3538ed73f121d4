"""The sections of a report: a module each, in the order of the page. A new one is its module and a line here."""

from cudadent42.stages.report.section import Section
from cudadent42.stages.report.sections import (
    cases,
    control,
    gates,
    kernels,
    limits,
    machine,
    others,
    planning,
    profile,
    reproduce,
    roofline,
    samples,
    script,
    speedup,
    verification,
)

SECTIONS: tuple[Section, ...] = (
    script.SECTION,
    speedup.SECTION,
    cases.SECTION,
    gates.SECTION,
    others.SECTION,
    planning.SECTION,
    samples.SECTION,
    control.SECTION,
    roofline.SECTION,
    profile.SECTION,
    verification.SECTION,
    kernels.SECTION,
    machine.SECTION,
    limits.SECTION,
    reproduce.SECTION,
)
