"""Proves on a machine with a GPU what CPUs cannot show: `make gpu`, or `python -m tools.gpu`.

`__main__` runs the sections of `sections` one after the other, each with a time limit, and writes every result at once.
`checks` is what a rank does in most of them, `models` what is trained there. Needs no network, and installs nothing.
"""
