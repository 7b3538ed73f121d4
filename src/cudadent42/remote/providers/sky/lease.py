"""A run on a machine of SkyPilot's, from its launch to the machine's end.

Whatever happens here, the machine ends by itself: SkyPilot's idle limit is set with the launch, and the run's longest
time is in the task. It is taken down from here only once what was measured is back, or where nothing was.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from cudadent42.base.errors import ExitCode, LabError, MachineNotReadyError, UsageError
from cudadent42.remote.core import job as jobs
from cudadent42.remote.core import record
from cudadent42.remote.core.hosts import DEFAULT_FOLDER
from cudadent42.remote.core.job import JobState, Workspace
from cudadent42.remote.core.record import JobRecord
from cudadent42.remote.core.run import Returned, RunLostError, RunRequest, give_up, persistently
from cudadent42.remote.core.scripts import script as far_script
from cudadent42.remote.core.ssh import ConnectionLostError
from cudadent42.remote.core.states import MachineState
from cudadent42.remote.core.terminal import Say
from cudadent42.remote.core.tree import Tree, archive
from cudadent42.remote.providers.sky.cluster import Cluster, ClusterLostError
from cudadent42.remote.providers.sky.launch import Launched, launch
from cudadent42.remote.providers.sky.reach import workspace_of
from cudadent42.remote.providers.sky.spec import Spec
from cudadent42.remote.providers.sky.task import Files, script, task
from cudadent42.remote.providers.ssh import AtHand
from cudadent42.runs import starts
from cudadent42.runs.starts import StartOutcome


class StillUpError(LabError):
    """A machine that should have been taken down is still there."""

    exit_code = ExitCode.NOT_READY


class Held:
    """The lease of a machine that SkyPilot is asked for: it sends the working tree and starts the run itself."""

    log_is_shown = True

    def __init__(self, spec: Spec, identity: str, kept: bool, tree: Tree, say: Say) -> None:
        """``identity``: of the start in the journal; ``kept``: the machine was there from a run before."""
        self._spec = spec
        self._identity = identity
        self._kept = kept
        self._tree = tree
        self._say = say
        self._cluster = Cluster(spec.cluster)
        self._begun: JobRecord | None = None
        """Once it may have begun."""
        self._workspace: Workspace | None = None

    @property
    def workspace(self) -> Workspace:
        assert self._workspace is not None, "its run has not begun"
        return self._workspace

    def begin(self, request: RunRequest, on_log: Callable[[bytes], None]) -> JobRecord:
        """Lasts until SkyPilot says that the run has ended.

        Raises MachineNotReadyError where the machine did not come up; it is taken down again.
        """
        spec = self._spec
        begun = JobRecord(
            record.new_job(),
            spec.cluster,
            str(request.output.absolute()),
            request.arguments,
            datetime.now(timezone.utc).isoformat(),
            folder=DEFAULT_FOLDER,
            address=str(spec.address),
            start=self._identity,
        )
        record.save(begun)
        self._say(
            f"asking SkyPilot for {spec.cluster}; it takes it down after {spec.idle_minutes} idle minutes"
        )
        launched = self._launched(begun, request.device, on_log)
        self._begun, self._workspace = begun, workspace_of(record.remote_of(begun))
        if self._state_there(begun, launched) is JobState.NONE:
            self._begun = None
            record.save(replace(begun, fetched=True))  # there is nothing that could be brought back
            raise self._never_ran(launched)
        if not launched.arrived:
            starts.mark(self._identity, StartOutcome.READY)
        return begun

    def keep(self, returned: Returned) -> None:
        """It is here."""

    def failed(self, error: BaseException) -> None:
        """A run that may be there keeps the machine, until it was idle for its minutes."""
        begun = self._begun
        if begun is None:
            return
        if isinstance(error, ClusterLostError):
            raise lost(begun, self._identity, error) from error
        # A run that was lost there is an error, and is back all the same.
        if not record.find(begun.job).fetched:
            self._say(
                f"{self._cluster.name} is not taken down, since what {begun.job} measured is only there; it takes "
                f"itself down, with that, when it was idle for {self._spec.idle_minutes} minutes. Bring it back "
                f"before: cudadent42 remote attach {begun.job}; or end it with: {self._cluster.end_command}"
            )
        elif (trouble := self.end()) is not None:
            self._say(str(trouble))

    def end(self) -> LabError | None:
        name, say = self._cluster.name, self._say
        if self._spec.keep:
            say(
                f"{name} is kept until it was idle for {self._spec.idle_minutes} minutes; "
                f"sooner: {self._cluster.end_command}"
            )
            return None
        # Another machine may have its name and address before a shared connection ends itself.
        self.workspace.connection.close()
        try:
            self._take_down()
        except LabError as error:
            return StillUpError(f"NOT TAKEN DOWN: {error}{self._may_go_on}")
        say(f"{name} is taken down")
        try:
            starts.mark(self._identity, StartOutcome.DELETED)
        except LabError as error:
            say(str(error))  # the run is back all the same; `remote status` corrects the journal
        return None

    def _launched(self, begun: JobRecord, device: str, on_output: Callable[[bytes], None]) -> Launched:
        """The launch, with its files. Raises KeyboardInterrupt, once it is said what goes on."""

        def on_arrival() -> None:
            with suppress(
                UsageError
            ):  # a full disk here ends no run there; it is tried again when it is back
                starts.mark(self._identity, StartOutcome.READY)

        with tempfile.TemporaryDirectory() as folder, archive(self._tree) as packed:
            files = Files(Path(folder) / "job.sh", Path(folder) / "tree.tar", self._tree.digest)
            files.script.write_text(script(far_script("job.sh")))
            with files.tree.open("wb") as file:
                shutil.copyfileobj(packed, file)
            path = Path(folder) / "task.yaml"
            path.write_text(task(self._spec, files, begun.job, device, begun.arguments))
            try:
                return launch(self._spec, path, begun.job, on_arrival, on_output)
            except KeyboardInterrupt:
                self._say(
                    f"{self._cluster.name} may be up, or come up, and {begun.job} may go on there; to bring it back: "
                    f"cudadent42 remote attach {begun.job}; to end it: cudadent42 remote stop --all"
                )
                raise

    def _state_there(self, begun: JobRecord, launched: Launched) -> JobState:
        """What the machine knows of the run; none where there is no machine, or where it was not given the task.

        Raises ConnectionLostError where it may have run and does not answer; ClusterLostError where it is gone.
        """
        workspace = self.workspace

        def asked() -> JobState:
            return jobs.state(workspace, begun.job).state

        try:
            return asked()
        except ConnectionLostError:
            if launched.exit_code != 0 and not self._may_have_run(launched):
                return JobState.NONE
        return persistently(asked, self._say, workspace.on_lost)

    def _may_have_run(self, launched: Launched) -> bool:
        """Whether a machine that does not answer may have something that was measured; in doubt it may."""
        if launched.arrived:
            return True
        try:
            reported = self._cluster.reported()
        except LabError:
            # A launch that came to its end has shown all that the machine said.
            return launched.exit_code < 0
        if reported is None:
            return False
        # SkyPilot sets the limit directly before it gives the machine the task. So one without it has not run, and
        # nothing would end it; one with it ends by itself.
        return reported.idle_minutes is None or reported.idle_minutes >= 0

    def _never_ran(self, launched: Launched) -> MachineNotReadyError:
        """The end of a machine that did not run, with the reason. One that was kept has its idle limit from before, and
        may have what another run measured."""
        said = f"{self._cluster.name} did not run: {launched.reason}"
        if self._kept:
            return MachineNotReadyError(
                f"{said}; it was kept from a run before, and is left to its idle limit; "
                f"sooner: {self._cluster.end_command}"
            )
        try:
            self._take_down()
        except LabError as error:
            return MachineNotReadyError(f"{said}; {error}{self._may_go_on}")
        starts.mark(self._identity, StartOutcome.FAILED, launched.reason)
        return MachineNotReadyError(said)

    def _take_down(self) -> None:
        """Raises LabError where that fails. An interrupt leaves it open, and that is said."""
        try:
            self._cluster.end()
        except KeyboardInterrupt:
            self._say(f"whether {self._cluster.name} is taken down is not known{self._may_go_on}")
            raise

    @property
    def _may_go_on(self) -> str:
        return f"; it may still cost money: sky status --refresh, {self._cluster.end_command}"


class Adopted(AtHand):
    """The lease of a run that was left on its machine, which stays until it was idle for its minutes."""

    def __init__(self, workspace: Workspace, say: Say, begun: JobRecord) -> None:
        super().__init__(workspace, say, begun)
        self._begun = begun

    def failed(self, error: BaseException) -> None:
        if isinstance(error, ClusterLostError):
            raise lost(self._begun, self.workspace.remote.start, error) from error
        super().failed(error)

    def end(self) -> LabError | None:
        at = Cluster(self._begun.remote)
        self._say(f"{at.name} is taken down when it was idle for some minutes; sooner: {at.end_command}")
        return None


def lost(begun: JobRecord, identity: str, error: ClusterLostError) -> RunLostError:
    """What became of a run whose machine does not run any more; on record, and in words."""
    if error.state is MachineState.STOPPED:
        starts.mark(identity, StartOutcome.STOPPED, str(error))
        return RunLostError(f"{error}, which brings back what {begun.job} measured")
    give_up(begun)
    starts.mark(identity, StartOutcome.DELETED, str(error))
    return RunLostError(f"{error}: nothing of {begun.job} is left")
