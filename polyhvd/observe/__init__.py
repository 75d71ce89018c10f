"""What ranks write about themselves, and what is read from it."""
