"""`zeromesh doctor`: what on a machine would keep a run from working, or from working well, and what to do about it.

`software` and `hardware` have a generator for each part of the report. It takes its measurements and judges them; where a
judgement has to be tested without such a machine, the measured values are arguments.
"""
