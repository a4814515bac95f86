"""The policy lab: many simulated runs, measured alike and put side by side.

Start with `comparison.py` (what is run, in which order) and `steady.py` (what is measured).
"""
