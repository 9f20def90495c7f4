"""Elastic training: survivors of a failure keep their process, and the job goes on with another number of ranks."""
