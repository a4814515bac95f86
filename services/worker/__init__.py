"""The worker: keeps one instance's calls in order of urgency and runs them on its engine.

Reading guide: `worker.py` (lives), `life.py` (what one life runs), `intake.py` (records in),
`running.py` (claim and run), `endings.py` (how a call ends), `upkeep.py` (commit and heal),
`drain.py` (leave in order), `calls.py` (what is held, in memory).
"""
