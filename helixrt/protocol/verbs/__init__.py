"""Rules of a rail over RDMA verbs, without hardware."""
