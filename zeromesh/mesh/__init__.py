"""The process mesh: rank arithmetic, the launch environment, process groups, transports and collectives.

Nothing is re-exported here, so that `zeromesh.mesh.axes` and `zeromesh.mesh.launch` load without torch.
"""
