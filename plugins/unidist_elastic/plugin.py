"""Registers what elastic training adds."""
