"""Fresh machines on any cloud that SkyPilot knows: we write the task and read the results, it does the rest.

    spec (what machine, from a TOML file) -> task (SkyPilot's YAML) -> run (launch, fetch, take down)

On the machine it is the same ``job.sh`` as over SSH, so a run there is fetched and picked up again in the same way.
"""
