"""The process mesh: rank arithmetic, the launch environment, process groups, transports and collectives.

Nothing is re-exported here, so that `zeromesh.mesh.mesh_shape` and `zeromesh.environment` load without torch.
"""
