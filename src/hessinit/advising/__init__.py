"""Which learning rate the curvature at the start allows, for the optimizer at hand."""
