"""How fast Dihedral serves: five workloads over gRPC, and a race against `transformers`."""
