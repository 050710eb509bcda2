"""Initial weights: `apply_scheme_` draws by closed forms, `initialize_` fits the curvature."""
