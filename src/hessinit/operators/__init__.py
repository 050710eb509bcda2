"""Matrices known by their products: the exact Hessian, the Gauss-Newton matrix and the output Jacobian."""

from __future__ import annotations

from hessinit.operators.base import LinearOperator
from hessinit.operators.blocks import GaussNewtonOperator, HessianOperator, JacobianOperator
from hessinit.operators.build import gauss_newton, hessian, jacobian

__all__ = [
    "GaussNewtonOperator",
    "HessianOperator",
    "JacobianOperator",
    "LinearOperator",
    "gauss_newton",
    "hessian",
    "jacobian",
]
