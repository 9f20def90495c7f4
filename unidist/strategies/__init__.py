"""The strategies of the core: plain data parallelism, and one that does nothing."""
