"""What `scripts/check_device.py` runs on an accelerator: parts, each in processes of its own, and what they found."""
