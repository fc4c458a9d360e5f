"""Whether the layout of a run computes what one plain process does: on a small copy of its model, tensor by tensor."""
