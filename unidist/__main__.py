"""`python -m unidist`: the command `unidist`, for where its script is not on the path."""

import importlib

if __name__ == "__main__":
    importlib.import_module("unidist_launch.__main__").main()  # imported when it is used, as what an entry point names
