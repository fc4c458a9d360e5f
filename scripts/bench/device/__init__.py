"""The parts of `scripts/check_device.py` that run on an accelerator, each in processes of its own, and what they found."""
