"""A folder for PYTHONPATH. The module `horovod` in it stands for Horovod's package."""
