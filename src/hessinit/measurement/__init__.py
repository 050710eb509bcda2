"""The verbs that measure a model: `measure` and `quadratic_form`."""
