"""The RDMA verbs endpoint: queue pairs on several NICs, TCP when none is left."""
