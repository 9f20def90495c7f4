"""Memory of a rank, by strategy: figures of a model, and the estimate. Imports no other folder."""
