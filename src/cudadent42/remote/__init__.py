"""The same run on another machine: send the working tree, start it there, follow it, bring the run folder back.

    core: address -> ssh (connection) -> tree (what is sent) -> job (what runs there) -> run (the order)
          money (what a run may cost) -> protection (its limits) -> watchdog (which holds them there)
          machines (all that was started) -> stopping (its end)
    providers: gce, sky (where machines come from)

What runs on the far side are POSIX scripts, sent with every call; a lost connection costs nothing but the wait.
"""
