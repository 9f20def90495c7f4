"""Which strategies, in which sizes, suit a model and a cluster: predicted step time and memory. Framework-free."""
