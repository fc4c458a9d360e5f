"""Machines and cards from public data."""
