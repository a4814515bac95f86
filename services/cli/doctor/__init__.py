"""`hexflow doctor`: what is wrong with a mesh, and what to do about it, on one screen.

`examination` looks, twice, and writes nothing; `snapshot` is what it saw; `findings` are rules over
that, without any server.
"""
