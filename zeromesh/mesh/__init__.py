"""The process mesh: rank arithmetic, the run's store, process groups, process sets and collectives. Nothing is re-exported here, so
that `zeromesh.mesh.mesh_shape` and the launcher load without torch."""
