"""Traces of a microbatch of the user's model, run without values to measure memory and work."""
