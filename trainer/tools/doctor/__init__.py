"""`zeromesh doctor`: what on a machine would keep a run from working, or from working well, and what to do about it.

`software` and `hardware` have a generator for each part of the report, which measures and judges.
"""
