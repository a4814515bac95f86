"""The gateway: an OpenAI-compatible HTTP API in front of the mesh, and the dashboard.

Read `serving.py` for what is served, `calls.py` for one call's way through the mesh, `board.py` for
what the dashboard knows.
"""
