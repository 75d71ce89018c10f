"""Jobs that lose and gain processes: which processes are in the world, and how a process rejoins it."""
