"""Initial weights: closed-form schemes (`apply_scheme_`) and curvature that fits the step (`initialize_`)."""
