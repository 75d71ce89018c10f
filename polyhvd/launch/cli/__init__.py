"""The command line of ``polyhvdrun``: options, configuration file, completion, dry runs."""
