"""The same run on another machine: send the working tree, start it there, follow it, bring the run folder back.

    address -> ssh (connection) -> tree (what is sent) -> job (what runs there) -> run (the order)

What runs on the far side is one POSIX script, ``job.sh``; a lost connection costs nothing but the wait.
"""
