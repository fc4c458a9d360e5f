"""The plans of runs before they start: layouts, and their estimated memory and time on a machine."""
