"""Whether what a candidate's process says can be believed: settings, functions, helpers, inputs."""
