"""Measures the collectives of a job: ``polyhvdrun -np 4 polyhvd bench``, or ``python -m polyhvd.bench``."""
