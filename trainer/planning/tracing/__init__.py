"""A microbatch of the user's own model, run without values to see what it needs and does."""
