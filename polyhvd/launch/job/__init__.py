"""Running a job: the loop over agents, the agents, output, signals, and the cause of a failure."""
