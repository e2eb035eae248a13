"""The job on a Ray cluster: rank actors, peer-to-peer state fetch, the run's store, a head for one machine.

The Ray implementations of the contracts in `helixrt.replica.contracts` are here; what decides is in `helixrt.job`.
Import it as `helixrt.ray_cluster`: as `ray_cluster` it would be a second copy.
"""
