"""The job on a Ray cluster: controller, rank actors, peer-to-peer state fetch, job launch.

The controller's decisions are pure policies over explicit states; the actors carry them out. The
Ray implementations of the contracts in `helixrt.replica.contracts` are here.
Import it as `helixrt.ray_cluster`: as `ray_cluster` it would be a second copy.
"""
