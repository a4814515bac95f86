"""`hexflow`: run a mesh on one machine, drive workloads through it, measure it.

Start with `app.py` (the commands), then `driver.py` (how a query's calls are driven through the
mesh) and `embedded.py` (the whole mesh in one process).
"""
