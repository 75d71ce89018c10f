"""The meaning of collectives, once for all frameworks."""
