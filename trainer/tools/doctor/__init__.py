"""`zeromesh doctor`: what of a machine would keep a run from working, or from working well, and what to do about it.

Each file looks at one part. What it finds out from the system is a value, and a function without side effects judges it.
"""
