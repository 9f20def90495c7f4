"""`python -m unidist.horovod_imports`: print the folder that makes `import horovod` mean unidist, for PYTHONPATH."""

from unidist.horovod_imports.path import PATH_ENTRY

print(PATH_ENTRY)
