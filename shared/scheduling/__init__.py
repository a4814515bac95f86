"""Scheduling mathematics: pure functions and small policies, the same ones live and simulated.

Start with `dispatch.py` (the score and who gets a call), then `urgency.py` (order of waiting) and
`budget.py` (how a query's SLO is split). Nothing here reads a clock, logs, or draws randomness.

Functions marked *leaf* take and return plain numbers and call no other function of this package,
so that the compiled simulator can compile the very same source.
"""
