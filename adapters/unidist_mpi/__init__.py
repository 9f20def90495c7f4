"""MPI as an engine, by mpi4py."""
