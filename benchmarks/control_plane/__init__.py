"""The control plane under thousands of simulated workers: `python -m benchmarks.control_plane`.

`job` runs the real launcher of a job (`ElasticRun`, `RemoteRun`) in a process of its own, `simulator` the hosts and
workers of that job: real agents, real connections of workers and real rendezvous, many to a process, without a script
or a framework. `scenario` says what happens to the job and takes the times, `growth` makes a table of several sizes.
"""
