"""`zeromesh doctor`: defects of a machine that keep a run from working, or from working well, and their remedies."""
