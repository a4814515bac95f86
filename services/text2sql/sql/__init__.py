"""Databases: what may run on them, how it runs, and what they contain."""
