"""Curvature of a loss: operators, Krylov methods and the engines that choose between them."""
