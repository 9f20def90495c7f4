"""Which token is on which rank: arithmetic on positions, without a framework."""
