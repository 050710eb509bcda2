"""What theory says about a layer: Jacobian bounds on its curvature, and signal-propagation diagnostics."""
