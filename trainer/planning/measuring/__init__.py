"""Measurements of the present machine."""
