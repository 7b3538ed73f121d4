"""The rows of docs/figures.md about the lab."""

from __future__ import annotations

from figure_bounds import Bound, Row, share, unit
from figure_readers import (
    bisections,
    busy,
    false_calls,
    fields,
    fleet,
    fleet_coverage,
    fleet_has,
    fleet_kills,
    fleet_of_gpus,
    hardened,
    honest,
    kills,
    ledger,
    mcp_start,
    prediction_errors,
    races,
    remote,
    tuned,
    tuning,
)

LAB: tuple[Row, ...] = (
    Row(
        "races of a version against itself on a 2-core machine, two at a time, called different",
        "cpu-races-calm",
        (Bound("races", 200, unit(""), at_least=True), Bound("called", 0.05, share)),
        false_calls,
    ),
    Row(
        "races against a kernel made 3 % slower on purpose, called slower",
        "cpu-races-calm",
        (Bound("races", 60, unit(""), at_least=True), Bound("found", 0.95, share, at_least=True)),
        races("slower.json", "slower"),
    ),
    Row(
        "races of equal code beside 1, 2 and 4 programs for every processor, called equal",
        "cpu-busy-loads",
        (Bound("races", 200, unit(""), at_least=True), Bound("equal", 0.95, share, at_least=True)),
        busy("same", "equal"),
    ),
    Row(
        "races of code that takes a tenth more, there, called slower",
        "cpu-busy-loads",
        (Bound("races", None, unit("")), Bound("found", 0.95, share, at_least=True)),
        busy("slower", "slower"),
    ),
    Row(
        "bisections of 16 commits with one slowdown of 10 %",
        "cpu-races",
        (Bound("runs", 20, unit(""), at_least=True), Bound("right", 19, unit(""), at_least=True)),
        bisections,
    ),
    Row(
        "what `run` predicts for a captured script, against the replay: off by this share of the script's time",
        "cpu-predictions",
        (
            Bound("training", 0.1, share),
            Bound("prefill", 0.1, share),
            Bound("generation with experts", 0.1, share),
        ),
        prediction_errors("train_gpt", "prefill_llama", "generate_qwen3_moe"),
    ),
    Row(
        "honest kernels, run as candidates again and again, each audited in every run, that were accused of "
        "anything",
        "cpu-honest-6",
        (
            Bound("kernels", 30, unit(""), at_least=True),
            Bound("runs", 5, unit(""), at_least=True),
            Bound("audited", 150, unit(""), at_least=True),
            Bound("accusations", 0, unit("")),
        ),
        fields(honest("kernels"), honest("runs"), honest("audited"), honest("accusations")),
    ),
    Row(
        "sweeps on the CPU with one configuration made 6 % faster: it is installed, and no other; blocks of the "
        "race over those of an exhaustive sweep, and all blocks with the default's and the confirmation's on "
        "both sides",
        "cpu-tuning",
        (
            Bound("sweeps", 20, unit(""), at_least=True),
            Bound("installed", 20, unit(""), at_least=True),
            Bound("race", 0.2, share),
            Bound("all", 0.2, share),
        ),
        fields(tuning("sweeps"), tuning("planted_installed"), tuning("blocks_share"), tuning("timed_share")),
    ),
    Row(
        "what tunings on an H200 gave over the usual choice of that day, in all cells that were tuned; the "
        "package's tables keep 16 of the 20 that gained, and the usual choice has caught up with four",
        "h200-tuned",
        (
            Bound("slower", 0, unit("")),
            Bound("geometric mean", 1.02, lambda value: f"{value:.3f}×", at_least=True),
        ),
        fields(tuned("slower"), tuned("geomean")),
    ),
    Row(
        "two hours of 1,000 invented GPUs under the real coordinator and journal: one core's time, and the GPUs' "
        "idle time",
        "cpu-fleet",
        (Bound("", 60, unit("s")), Bound("idle", 0.1, share)),
        fields(fleet("large", "processor_s"), fleet("large", "idle_share")),
        among=fleet_has("large"),
    ),
    Row(
        "a sweep of 26 decode cases by two H200s of a host: its time, of one's, and cases with other winners",
        "h200-fleet-of-gpus",
        (Bound("", 0.55, unit("×")), Bound("cases", 0.05, share)),
        fleet_of_gpus,
    ),
    Row(
        "tunings of invented fleets with limits of time and money drawn by chance that passed one",
        "cpu-fleet",
        (
            Bound("tunings", 1000, lambda value: f"{value:,.0f}", at_least=True),
            Bound("passed", 0, unit("")),
        ),
        fields(fleet("budgets", "seeds"), fleet("budgets", "passed")),
        among=fleet_has("budgets"),
    ),
    Row(
        "simulated fleets of 4, 8 and 16 machines whose truth lay in the 95 % interval over them",
        "cpu-fleet",
        (Bound("least", 0.93, share, at_least=True), Bound("most", 0.97, share)),
        fleet_coverage,
        among=fleet_has("coverage"),
    ),
    Row(
        "`kill -9` of a tuning's coordinator or one of its workers at a random moment; tunings without their right "
        "end after it; blocks lost or counted twice",
        "cpu-fleet",
        (
            Bound("kills", 100, unit(""), at_least=True),
            Bound("tunings", 0, unit("")),
            Bound("blocks", 0, unit("")),
        ),
        fleet_kills,
        among=fleet_has("kills"),
    ),
    Row(
        "random calls of the CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer, and damaged cache "
        "entries",
        "hardening-whole",
        (
            Bound("calls", 1e4, lambda value: f"{value:,.0f}", at_least=True),
            Bound("entries", 1e4, lambda value: f"{value:,.0f}", at_least=True),
            Bound("failures", 0, unit("")),
        ),
        fields(hardened("kernel_calls"), hardened("damaged_entries"), hardened("failures")),
    ),
    Row(
        "`cudadent42 mcp`, from its start to the first answer",
        "cpu-mcp-start",
        (Bound("", 300, unit("ms")),),
        mcp_start,
    ),
    Row(
        "`kill -9` at a random moment of a session",
        "session-kill",
        (
            Bound("kills", 100, unit(""), at_least=True),
            Bound("resumes", 100, unit(""), at_least=True),
            Bound("samples lost", 0, unit("")),
        ),
        kills,
    ),
    Row(
        "the ledger of run folders with a million samples, from the command line",
        "cpu-ledger-scale",
        (
            Bound("samples", 1e6, lambda value: f"{value:,.0f}", at_least=True),
            Bound("opened and listed", 1, unit("s")),
            Bound("rebuilt", 60, unit("s")),
        ),
        fields(ledger("samples"), ledger("list_s"), ledger("rebuild_s")),
    ),
    Row(
        "a bare Debian without Python, pip and compiler to `Preflight OK`, unattended; again: the slowest of five",
        "remote",
        (Bound("first", 300, unit("s")), Bound("again", 5, unit("s"))),
        fields(remote("bootstrap", "slowest_first_s"), remote("bootstrap", "slowest_second_s")),
    ),
    Row(
        "a run elsewhere over SSH, loopback, warm: beyond the run itself, medians",
        "remote",
        (Bound("shared connection", 3, unit("s")), Bound("new connection", 3, unit("s"))),
        fields(remote("overhead", "shared", "overhead_s"), remote("overhead", "new", "overhead_s")),
    ),
    Row(
        "the connection cut at a random moment of sending, bootstrap, run or fetching",
        "remote",
        (
            Bound("cuts", 50, unit(""), at_least=True),
            Bound("whole run folders back", 50, unit(""), at_least=True),
            Bound("processes left there", 0, unit("")),
        ),
        fields(
            remote("cuts", "cuts"),
            remote("cuts", "folders_brought_back"),
            remote("cuts", "processes_left_there"),
        ),
    ),
    Row(
        "hostile host, path, case and branch names",
        "remote",
        (Bound("names", 200, unit(""), at_least=True), Bound("executed", 0, unit(""))),
        fields(remote("names", "names"), remote("names", "executed")),
    ),
)
