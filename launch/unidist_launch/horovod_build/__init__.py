"""Builds Horovod for the installed frameworks: sources, wheel and cache. Imports `display`."""
