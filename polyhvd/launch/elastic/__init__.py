"""The launcher's part in an elastic job: the driver, discovery of hosts, slow ranks, leaving."""
