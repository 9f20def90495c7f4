"""The `unidist` command: launches jobs, and shows what is installed."""
