"""Stands for Horovod's package where this folder is on the path: has unidist answer, and is replaced by its answer."""

import importlib

from unidist.horovod_imports.hook import as_horovod

as_horovod()  # which drops this module
importlib.import_module(__name__)
