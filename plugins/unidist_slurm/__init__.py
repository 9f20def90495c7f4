"""Jobs in allocations of Slurm: a launcher, and scripts for sbatch."""
