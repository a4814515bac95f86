"""The tuner: watches P95, replays its window over a grid of α, publishes the better one.

`window.py` keeps the recent past, `replay.py` asks the simulator, `tuner.py` decides and publishes.
"""
