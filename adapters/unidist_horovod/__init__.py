"""The engine `horovod`: Horovod's own runtime as communicators. Importing this package imports nothing heavy."""
