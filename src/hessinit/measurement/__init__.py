"""The verbs that measure a model: curvature, quadratic forms, Jacobian bounds, diagnostics."""
