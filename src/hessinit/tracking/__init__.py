"""Follow the curvature through training: measured now and then, within a share of the time."""
