"""The services of the mesh: one process each; they share messages, never code."""
