"""The simulator: a whole fleet as one discrete-event model, and one instance's batching.

Start with `iteration.py` (what one iteration of an instance does) and `scenario.py` (what a run
is made of). The live simulated engine and the compiled fleet simulator run the same functions.
Pure: nothing here logs, reads a clock or draws randomness that was not passed in.
"""
