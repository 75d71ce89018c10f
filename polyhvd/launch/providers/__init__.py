"""Where jobs come from: a file for each way in which ranks are started."""
