"""The launchers that need no scheduler: on this host (`local`), by ssh (`ssh`), and of elastic jobs (`elastic`).

Each is a thin class over the folder that does the work. Imports `elastic_job`, `observation`,
`options`, `output`, `remote` and `side_processes`.
"""
