"""Which rank holds which experts, their capacity, and where divided parameters belong. Arithmetic, for all frameworks.

Private. Imports the core alone.
"""
