"""`hexflow ask` and `hexflow eval`: the Text-to-SQL agent on a mesh."""
