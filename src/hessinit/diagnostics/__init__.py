"""What first-order users look at: activations, gradients, dead and saturated units, correlations."""
