"""Jobs that lose and gain processes and go on: who is in the world, and how a process comes back into it."""
