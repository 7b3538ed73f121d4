"""A process that runs code nobody vouches for, confined by what the machine offers.

    `policy`        what may be read and written, and the limits: data
    `enter`         confines the process that calls it, layer by layer, and says which were there
    `launch`        the side of whoever starts such a process: the command, the environment, the probe
    one module a layer: `namespaces`, `tree`, `landlock`, `seccomp`, `privileges`, `limits`, `cgroup`, `environment`

Nothing here is emulated: a layer is there because its system call succeeded, or it is reported as not there.
"""
