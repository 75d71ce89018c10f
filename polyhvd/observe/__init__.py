"""Files that ranks write about themselves, and the programs that read them."""
