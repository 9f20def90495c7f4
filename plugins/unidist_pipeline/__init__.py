"""Schedules of pipeline parallelism as data: made, checked, simulated, drawn, read and written, without a framework.

`schedule.py` is the data model; `schedules.py`, `zero_bubble.py` and `v_shape.py` make schedules, through
`building.py`; `validation.py` checks them, `simulation.py` says how long they take and what they hold in memory,
`drawing.py` and `plot.py` show them, `schedule_file.py` reads and writes them. `catalog.py` finds them by name, also
those of other plugins.
"""
