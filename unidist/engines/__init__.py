"""The engines of the core: `single` for one process, `shm` for the processes of one host."""
