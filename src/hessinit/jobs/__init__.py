"""Pieces of work, done in this process, in worker processes, or on somebody's executor."""
