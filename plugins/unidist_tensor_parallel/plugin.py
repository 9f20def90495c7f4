"""Registers the strategy `tensor`."""
