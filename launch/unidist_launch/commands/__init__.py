"""The commands of `unidist` that come with the launcher.

A command reads its options, calls the folders that do the work, and prints. Imports all other folders.
"""
