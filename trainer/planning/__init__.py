"""The plans of runs before they start: layouts, and the memory and the seconds that each will take on a machine."""
