"""The sections of a configuration: every key, its default, what is allowed and what it does; a module for each."""
