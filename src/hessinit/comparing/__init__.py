"""Short trainings from several starts, side by side: which start trains best, honestly."""
