"""Confines the process that calls it: ``python -m cudadent42.sandbox.enter POLICY REPORT COMMAND...``, or `enter`.

Every layer is tried by its system call. With ``Policy.wanted`` nothing goes on without those layers; without it
(a probe) the report says which were there. The command is then given one more argument: its parent's process id.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from cudadent42.model.sandbox import Layer, LayerState
from cudadent42.sandbox import cgroup, landlock, limits, namespaces, privileges, seccomp, tree
from cudadent42.sandbox.environment import private_places
from cudadent42.sandbox.namespaces import tried
from cudadent42.sandbox.policy import Policy

REFUSED_EXIT = 77
"""A layer that was wanted is not there (EX_NOPERM): nothing of the command ran."""

SEED_VARIABLE = "FLASHMOE_CACHE_SEED"


class LayerMissingError(Exception):
    """A layer that the policy wants is not there any more."""


def enter(policy: Policy) -> list[LayerState]:
    """Goes on confined, maybe as another process (`namespaces.become_first`). Single-threaded callers only.

    The environment has to be clean already (`environment.cleaned`): a process cannot make others forget its first one.

    Raises:
        LayerMissingError: a layer that the policy wants is not there. What is there already stays.
    """
    parent = os.getppid()
    states = [LayerState(Layer.ENVIRONMENT, True)]
    states += _groups(policy)
    states.append(tried(Layer.RLIMITS, lambda: limits.apply(policy.limits)))
    states += _namespaces()
    inside = [state.layer for state in states if state.there]

    def confine() -> None:
        """In the innermost namespaces, before there is a process that runs anything of a candidate's."""
        states.extend(_files_and_calls(policy, inside))
        _require(policy, states)

    if Layer.PROCESSES in inside:
        watched = Layer.GROUP_PROCESSES not in inside and os.geteuid() == 0
        privileges.end_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        states.append(_process_limit(policy, inside, watched=watched))
        namespaces.become_first(policy.limits.processes if watched else None, confine)
        privileges.hide_memory(False)
    else:
        states.append(_process_limit(policy, inside, watched=False))
        confine()
        privileges.hide_memory(False)
        privileges.end_with_parent()
        if os.getppid() != parent:
            os._exit(1)
    _settle(policy)
    return states


def _groups(policy: Policy) -> list[LayerState]:
    why_not = "" if policy.cgroups else "no control group may be made here"
    memory = processes = False
    try:
        memory, processes = cgroup.join(policy.cgroups)
    except OSError as error:
        why_not = str(error)
    return [
        LayerState(Layer.GROUP_MEMORY, memory, "" if memory else why_not or "no such controller"),
        LayerState(Layer.GROUP_PROCESSES, processes, "" if processes else why_not or "no such controller"),
    ]


def _namespaces() -> list[LayerState]:
    """User, mounts, network, IPC, and processes where these can have a /proc of their own."""
    # In a process of its own first: a namespace that is made, and has no users then, could not be left.
    why_no_user = namespaces.can(namespaces.own_user)
    states = [
        LayerState(Layer.USER, False, why_no_user) if why_no_user else tried(Layer.USER, namespaces.own_user)
    ]
    states.append(tried(Layer.TREE, lambda: namespaces.unshare(namespaces.MOUNT)))
    states.append(tried(Layer.NETWORK, lambda: namespaces.unshare(namespaces.NET)))
    states.append(tried(Layer.IPC, lambda: namespaces.unshare(namespaces.IPC)))
    if not states[1].there:
        states.append(LayerState(Layer.PROCESSES, False, "it needs a file tree of its own"))
        return states
    why_not = namespaces.can(_own_processes)
    if why_not:
        states.append(LayerState(Layer.PROCESSES, False, why_not))
    else:
        states.append(tried(Layer.PROCESSES, lambda: namespaces.unshare(namespaces.PID)))
    return states


def _own_processes() -> None:
    """Tried in a process that ends with it: without a /proc of its own a process namespace helps nobody."""
    namespaces.unshare(namespaces.PID)
    if why_not := namespaces.can(tree.mount_proc):
        raise OSError(0, why_not)


def _process_limit(policy: Policy, inside: list[Layer], *, watched: bool) -> LayerState:
    most = f"{policy.limits.processes:,}"
    if Layer.GROUP_PROCESSES in inside:
        return LayerState(Layer.PROCESS_COUNT, True, f"{most}, by the control group")
    if watched:
        return LayerState(Layer.PROCESS_COUNT, True, f"{most}, counted ten times a second")
    return tried(Layer.PROCESS_COUNT, lambda: limits.limit_processes(policy.limits))


def _files_and_calls(policy: Policy, inside: list[Layer]) -> list[LayerState]:
    states = []
    own_tree = Layer.TREE in inside
    if own_tree:
        replaced = tried(Layer.TREE, lambda: _own_tree(policy, Layer.PROCESSES in inside))
        own_tree = replaced.there
        states.append(replaced)
    scratch = _make_scratch(policy, own_tree)
    apart = Layer.PROCESSES in inside and Layer.IPC in inside
    states.append(tried(Layer.CAPABILITIES, privileges.drop_capabilities))
    states.append(tried(Layer.PRIVILEGES, privileges.renounce))
    states += _landlock(policy, scratch, own_tree)
    states.append(tried(Layer.SYSTEM_CALLS, lambda: seccomp.install(own_tree=own_tree, own_processes=apart)))
    privileges.hide_memory(True)
    return states


def _own_tree(policy: Policy, own_proc: bool) -> None:
    tree.replace_root(
        policy.readable, policy.devices, policy.scratch, policy.limits.scratch_bytes, own_proc=own_proc
    )


def _landlock(policy: Policy, scratch: str, own_tree: bool) -> list[LayerState]:
    readable = ("/",) if own_tree else (*policy.readable, "/proc", "/sys")
    writable = (scratch, *(tree.TEMPORARY if own_tree else ()))
    rules = landlock.Rules(readable, writable, (*tree.NODES, *policy.devices))
    needed = {
        Layer.LANDLOCK_FILES: landlock.FILES_ABI,
        Layer.LANDLOCK_TCP: landlock.TCP_ABI,
        Layer.LANDLOCK_SIGNALS: landlock.SIGNAL_ABI,
    }
    try:
        version = landlock.restrict(rules)
    except OSError as error:
        return [LayerState(layer, False, error.strerror or str(error)) for layer in needed]
    return [
        LayerState(
            layer, version >= least, f"version {version}" + ("" if version >= least else f" < {least}")
        )
        for layer, least in needed.items()
    ]


def _require(policy: Policy, states: list[LayerState]) -> None:
    there = {state.layer.value: state.there for state in states}  # the last word on each
    lost = [name for name in policy.wanted or () if not there.get(name, False)]
    if lost:
        raise LayerMissingError(", ".join(lost))


def _make_scratch(policy: Policy, own_tree: bool) -> str:
    """The private folders. Where the scratch folder is the machine's, several processes share it: each has its own."""
    scratch = policy.scratch if own_tree else tempfile.mkdtemp(dir=policy.scratch)
    os.environ.update(private_places(scratch))
    for name in ("home", "tmp", "cache"):
        os.mkdir(f"{scratch}/{name}", mode=0o700)
    for below, target in policy.links.items():
        link = Path(scratch, "cache", below)
        for folder in reversed(link.parents):
            folder.mkdir(mode=0o700, exist_ok=True)
        link.symlink_to(target)
    return scratch


def _settle(policy: Policy) -> None:
    if policy.cache_seed:
        os.environ[SEED_VARIABLE] = policy.cache_seed
    tempfile.tempdir = None
    try:
        os.chdir(policy.folder)
    except OSError:  # not among what it may see
        os.chdir("/")


def last_words(states: list[LayerState]) -> list[LayerState]:
    """One state of each layer: of a file tree, making the namespace is the first half."""
    return list({state.layer: state for state in states}.values())


def main() -> int:
    import json

    policy, report = Policy.from_json(sys.argv[1]), int(sys.argv[2])
    try:
        states = last_words(enter(policy))
    except LayerMissingError as error:
        print(f"the sandbox lacks {error}, so nothing was run", file=sys.stderr, flush=True)
        return REFUSED_EXIT
    if report >= 0:
        text = json.dumps([[state.layer.value, state.there, state.detail] for state in states])
        os.write(report, text.encode())
        os.close(report)
    command = sys.argv[3:]
    if not command:
        return 0
    os.execv(command[0], [*command, str(os.getppid())])


if __name__ == "__main__":
    sys.exit(main())
