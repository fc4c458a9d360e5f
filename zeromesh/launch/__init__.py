"""The launcher: starts the rank processes of a run on one host or several, passes signals on, and reports the first failure."""
