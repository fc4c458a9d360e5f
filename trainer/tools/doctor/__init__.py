"""`zeromesh doctor`: defects of a machine that keep a run from working, or from working well, and their remedies.

`software` and `hardware` have one generator per part of the report, which measures and judges.
"""
