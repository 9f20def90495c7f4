"""The engine `mpi`: MPI as communicators, by mpi4py. Importing this package imports nothing heavy."""
