"""Hosts: lists of them, checks before a job starts, and the doctor."""
