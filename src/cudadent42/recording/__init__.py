"""What a script asks of attention and experts: recorded while it runs, written as a suite, checked by running it again.

`records` is what one run of a script leaves, and `suite` what suites become of it. `context` is `cudadent42.capture`,
and `child` the process in which a script runs. The rest, which imports torch, is how calls are seen and timed.
"""
