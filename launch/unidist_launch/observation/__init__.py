"""The observers of a job, and the events that they are told. Imports `output` and `side_processes`.

`Observation` stands between a job and its observers. `FixedJobEvents` says what happens in a job whose ranks do not
change; elastic jobs publish their events themselves.
"""
