"""Time of a step, by strategy: measurements, work of a model, prediction and search. Imports `memory`."""
