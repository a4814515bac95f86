"""A model that is a script: deterministic, for tests and `hexflow eval --scripted`."""
