"""Model, loss and batch, checked once and put into functional form."""
