"""One world of ranks, as a value: placements, connections, engines."""
