"""Two generated sample databases and questions about them, with checked SQL.

`bazaar` is a shop, `league` a football league. They are made at run time from a seed, on SQLite or
any database SQLAlchemy can write to; the questions are TOML files beside this one.
"""
