"""The figures of the machine that is here, measured."""
