"""Initial weights whose curvature fits the learning rate."""
