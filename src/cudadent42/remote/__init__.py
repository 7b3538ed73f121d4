"""The same run on another machine: send the working tree, start it there, follow it, bring the run folder back.

    core: address -> ssh (connection) -> tree (what is sent) -> job (what runs there) -> run (sent, fetched)
          money (what a run may cost) -> protection (its limits) -> watchdog (which holds them there)
          provider (the protocol of those that have machines)
    providers: ssh (the user's own machines), gce, sky
    flows: pipeline (a run elsewhere, in order), survey (all machines that were started), stopping (their end)

What runs on the far side are POSIX scripts, sent with every call; a lost connection costs nothing but the wait.
"""
