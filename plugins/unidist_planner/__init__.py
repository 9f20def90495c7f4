"""How long a step takes, how much memory it needs, and which strategies divide it best."""
