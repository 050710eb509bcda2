"""Results as plain data: frozen dataclasses that print, plot, and read and write JSON; none needs
torch.
"""
