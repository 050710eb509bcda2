"""Training: compare initializations, follow the curvature, choose a learning rate."""
