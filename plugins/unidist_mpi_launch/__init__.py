"""Jobs whose ranks mpirun starts."""
