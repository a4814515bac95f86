"""The Text-to-SQL agent: reads questions, drives a workflow through the mesh, answers with rows.

Open these first: `flow/definition.py` (what a workflow is), `flow/runner.py` (how one runs),
`chess/steps.py` (the Text-to-SQL steps), `sql/safety.py` (what SQL may run), `agent.py` (the
service).
"""
