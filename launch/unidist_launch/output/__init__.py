"""Output of ranks: cut into lines, folded, shown and kept. Imports no other folder."""
