"""Measurements of polyhvd beside its peers; ``python -m benchmarks --help``."""
