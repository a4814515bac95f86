"""Workflows as data, and what runs any of them through the mesh."""
