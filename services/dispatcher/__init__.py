"""The dispatcher: which instance gets a call, and what becomes of a dead instance's calls."""
