"""Additions of elastic training to a rank: stack dumps on the launcher's signal, and step times for the coordinator.

`plugin` is all there is; elastic training itself is `unidist.elastic`. Nothing here is public.
"""
