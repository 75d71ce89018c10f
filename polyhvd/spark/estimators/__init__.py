"""Spark ML estimators: what those of all frameworks share. A framework's part is spark.py of its folder."""
